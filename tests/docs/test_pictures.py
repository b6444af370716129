"""The pictures of the documentation are what docs/pictures.py draws today."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = sorted(path.name for path in (DOCS / "pictures").glob("*.svg"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

MAX_PIXELS = 2.0
"""What a position may differ by: K/V are drawn, and differ in their last bits by machine."""


@pytest.fixture(scope="module")
def drawn(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything drawn anew."""
    folder = tmp_path_factory.mktemp("pictures")
    command = [sys.executable, str(DOCS / "pictures.py"), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def test_the_same_pictures_are_drawn(drawn: Path) -> None:
    assert sorted(path.name for path in drawn.iterdir()) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_current(name: str, drawn: Path) -> None:
    kept, new = ((folder / name).read_text() for folder in (DOCS / "pictures", drawn))
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", new), "run: python docs/pictures.py"
    numbers = zip(NUMBER.findall(kept), NUMBER.findall(new), strict=True)
    far = [(a, b) for a, b in numbers if abs(float(a) - float(b)) > MAX_PIXELS]
    assert not far, "run: python docs/pictures.py"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_shown_on_a_page_and_reads_alone(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")]
    assert any(f"(pictures/{name})" in page for page in pages)
    root = ElementTree.parse(DOCS / "pictures" / name).getroot()
    assert root.find("{*}title") is not None, "a title, for screen readers"
    card = root[1]
    assert card.get("fill") == "#f8f7f4", "a card of its own, for light and dark pages"
    assert any(child.tag.endswith("text") for child in root), "text as text"
