"""The README's Python runs and prints what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)


def _snippets() -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "README.md").read_text())


def test_the_readme_has_a_snippet_with_its_output() -> None:
    assert _snippets()


@pytest.mark.parametrize("number", range(len(_snippets())))
def test_a_readme_snippet_prints_what_it_says(
    number: int, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, expected = _snippets()[number]
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert printed.getvalue() == expected


def test_the_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_page_the_readme_links_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        if "://" not in link:
            assert (ROOT / link).exists(), link
