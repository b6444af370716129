"""The README says what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_page_the_readme_links_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        if "://" not in link:
            assert (ROOT / link).exists(), link
