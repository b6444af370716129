"""`kvnotes explain` and `kvnotes doctor` on the embedded model: what is said is what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvnotes import Session
from kvnotes.cli.check import Prepared, prepare
from kvnotes.cli.explain import Explainer
from kvnotes.cli.explain_records import TurnPlan
from kvnotes.cli.run import new_session, run_turn
from kvnotes.cli.source import read_source
from kvnotes.session import Model, Turn, load

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

NUM_REPLY = 5
"""Shorter than any reply of the examples, so that no reply ends before it."""


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return load(str(smollm2_path))


def scenario(name: str, num_reply: int | None = None) -> Prepared:
    """An example, its replies cut to a length."""
    prepared = prepare(read_source(str(EXAMPLES / name)))
    if num_reply is None:
        return prepared
    turns = []
    for turn in prepared.scenario.turns:
        sampling = getattr(turn, "generate", None)
        if sampling is not None:
            short = sampling.model_copy(update={"max_new_tokens": num_reply})
            turn = turn.model_copy(update={"generate": short})
        turns.append(turn)
    changed = prepared.scenario.model_copy(update={"turns": turns})
    return replace(prepared, scenario=changed)


def ran(prepared: Prepared, model: Model, count: int | None = None) -> list[Turn]:
    session: Session = new_session(prepared, model)
    turns = prepared.scenario.turns[:count]
    return [run_turn(session, i, turn, compare=False) for i, turn in enumerate(turns)]


def planned(prepared: Prepared, model: Model, monkeypatch: pytest.MonkeyPatch) -> list[TurnPlan]:
    """Explain a scenario while the model's forward fails."""

    def fails(*args: object, **kwargs: object) -> None:
        raise AssertionError("a forward pass ran")

    with monkeypatch.context() as patched:
        patched.setattr(model.engine.model, "forward", fails)  # type: ignore[attr-defined]
        with pytest.raises(AssertionError, match="a forward pass ran"):
            model.engine.prefill((1, 2, 3))
        return [item.record for item in Explainer(prepared, model)]


def compare(plans: Sequence[TurnPlan], turns: Sequence[Turn]) -> None:
    assert len(plans) >= len(turns) > 0
    for plan, turn in zip(plans, turns, strict=False):
        tokens = turn.plan.tokens
        assert (plan.turn, plan.plan) == (plan.turn, turn.plan.shape)
        assert plan.tokens.model_dump() == {
            "total": tokens.total,
            "reused": tokens.reused,
            "moved": tokens.moved,
            "computed": tokens.computed,
        }, plan.turn
        assert (plan.strategy, plan.exact, plan.notes, plan.fallback_reason) == (
            turn.strategy,
            turn.plan.exact,
            list(turn.notices),
            turn.fallback_reason,
        )


def test_plans_of_the_shop_are_those_of_its_run(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = scenario("retail.yaml", NUM_REPLY)
    plans = planned(prepared, model, monkeypatch)
    turns = ran(prepared, model)
    assert [len(turn.token_ids) for turn in turns if turn.text is not None] == [NUM_REPLY] * 2
    compare(plans, turns)
    assert len(plans) == len(turns) == 10


def test_plans_of_the_shop_hold_until_a_reply_is_shorter_than_assumed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = scenario("retail.yaml")
    plans = planned(prepared, model, monkeypatch)
    turns = ran(prepared, model, 4)
    compare(plans, turns[:3])
    assert plans[2].assumed_reply_tokens == 40 > len(turns[2].token_ids)
    assert plans[3].plan == turns[3].plan.shape
    assert plans[3].tokens.total > turns[3].plan.tokens.total


def test_plans_of_variants_hold_until_a_verify_refuses_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = scenario("variants.yaml")
    plans = planned(prepared, model, monkeypatch)
    turns = ran(prepared, model, 4)
    compare(plans, turns[:3])
    assert [turn.strategy for turn in turns[2:]] == ["swap", "refresh+erratum"]
    verify, done = plans[3].verify, turns[3].verification
    assert verify is not None and done is not None
    assert (plans[3].strategy, *verify.may_follow)[: len(done.rungs)] == done.rungs
    assert verify.check_tokens == done.num_checked_tokens


def kvnotes(*args: str, columns: str = "100") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvnotes.cli.main", *args],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "COLUMNS": columns, "PYTHONPATH": str(ROOT)},
        timeout=600,
    )


def checked(done: subprocess.CompletedProcess[str], schema: str) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, "")
    record: dict[str, Any] = json.loads(done.stdout)
    text = (ROOT / "docs" / schema).read_text(encoding="utf-8")
    jsonschema.Draft202012Validator(json.loads(text)).validate(record)
    return record


def test_explain_prints_every_turn_within_its_width(smollm2_path: Path) -> None:
    shop = str(EXAMPLES / "retail.yaml")
    done = kvnotes("explain", shop, "--threads", "1", "--quiet", columns="80")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "\x1b" not in done.stdout
    for number in range(1, 11):
        assert any(line.startswith(f"{number:>3} ") for line in lines), number
    assert "4 answers: computes " in done.stdout


def test_explain_takes_another_strategy_and_keeps_its_contract(smollm2_path: Path) -> None:
    shop = str(EXAMPLES / "retail.yaml")
    done = kvnotes("explain", shop, "--json", "--strategy", "selective", "--dtype", "bfloat16")
    record = checked(done, "explain.schema.json")
    assert record["dtype"] == "bfloat16"
    scored = [turn["turn"] for turn in record["turns"] if turn["scored_tokens"]]
    assert scored == [5, 6, 7, 8], "turn 9 asks for suffix"
    assert record["segments"][0]["predicted_ms"] > 0


def test_doctor_finds_the_embedded_model_usable(smollm2_path: Path) -> None:
    record = checked(kvnotes("doctor", "--json"), "doctor.schema.json")
    assert record["usable"]
    assert record["layout"]["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    gate = record["gate"]
    assert all(row["gap"] < row["tolerance"] == 1e-5 for row in gate["rows"])
    assert record["template"]["prefix_stable"] and not record["template"]["shows_time"]
    assert record["tokenizer"]["end_tokens"] == ["<|im_end|>"]
