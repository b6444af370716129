"""A process that is killed: nothing acknowledged is lost, nothing half is seen, all goes on.

`bench/store_kill.py` does this at 100 random times, and at every system call.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers_kill import WORKS, Scene

SECONDS = 0.15
"""A process does its work some times in this time, and dies in the middle."""


@pytest.mark.parametrize("work", WORKS)
def test_kill_at_a_random_time_loses_nothing(tmp_path: Path, work: str) -> None:
    scene = Scene(tmp_path, long=True, pulls=work == "pull")
    chosen = random.Random(work)
    for _ in range(2):
        scene.kill_at_random(work, chosen, SECONDS)
    assert scene.faults == []


@pytest.mark.parametrize("work", WORKS)
def test_kill_at_a_system_call_loses_nothing(tmp_path: Path, work: str) -> None:
    scene = Scene(tmp_path, long=False, pulls=work == "pull")
    for call in random.Random(work).sample(range(16), 3):
        scene.kill_at_call(work, call)
    assert scene.faults == []


def test_what_is_lost_is_noticed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, long=False)
    scene.notes.write_text("put7\n")
    scene.look("put")
    assert scene.faults == ["put: put7 was acknowledged, and is lost"]
