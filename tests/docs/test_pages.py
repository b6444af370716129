"""The pages of the documentation do what they say, and hang together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers_pages import DOCS, ROOT, Block, Page, anchors, blocks, commands, links, matches

ALL = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted(DOCS.glob("*.md"))]
RUN = {"console", "python"}
ELSEWHERE = {
    "cli": "tests/real/test_cli.py",  # runs the demo twice; that test does, once
    "lint": "tests/unit/test_cli_lint.py",
    "vllm-client": "tests/vllm/test_client.py",  # with a server
}
"""Pages whose commands another test runs."""
PAGES = [
    page
    for page in ALL
    if page.stem not in ELSEWHERE and any(b.language in RUN for b in blocks(page))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_says(
    page: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    Page(page, tmp_path, smollm2_path.parent).run()


def test_there_are_pages_that_run() -> None:
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())
    assert {"README", "tutorial", "library", "sessions", "when"} <= {page.stem for page in PAGES}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_can_be_reached_from_the_index_and_the_index_from_the_readme() -> None:
    assert "docs/index.md" in links(ROOT / "README.md")
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        found = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        waiting += [p for p in found if p.suffix == ".md" and p.parent == DOCS and p not in reached]
    assert set(DOCS.glob("*.md")) <= reached


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_every_picture_has_words_for_those_who_do_not_see_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for words in re.findall(r"!\[([^\]]*)\]\([^)]*\.svg\)", text):
        assert len(words) >= 20, words


def test_changes_names_a_test_that_exists_for_every_row() -> None:
    text = (DOCS / "changes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]\d+) \|", text, re.MULTILINE)
    proofs = dict(re.findall(r"^\* ([A-Z]\d+): (.*(?:\n  .*)*)", text, re.MULTILINE))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(rows) >= 25
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(proofs)
    for row, proof in proofs.items():
        named = re.findall(r"`(test_\w+)`", proof)
        assert named, row
        assert set(named) <= there, (row, set(named) - there)


# -- the rules by which outputs are compared -----------------------------------------------


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("a\n", "a\n"),
        ("size   1.2 MB\n", "size 1.2 MB   \n\n"),
        ("took 12 ms\n", "took 3,481.2 s\n"),
        ("key 4aab1bacee41, 1 thread\n", "key 0123456789abcdef0123, 16 threads\n"),
        ("torch 2.13.0+cpu on 2026-11-30\n", "torch 2.6.1 on 2027-01-02T03:04:05+00:00\n"),
        ("gap 1.2e-06\n", "gap 3e-07\n"),
        ("a\n...\nz\n", "a\nz\n"),
        ("a\n...\nz\n", "a\nb\nc\nz\n"),
        ("a ... z\n", "a b c z\n"),
    ],
)
def test_what_may_vary_is_alike(expected: str, actual: str) -> None:
    assert matches(expected, actual)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("a\n", "b\n"),
        ("a\n", "a\nb\n"),
        ("a\n...\nz\n", "a\nb\n"),
        ("a...\n", "a\nb\n"),
        ("1,662 tokens\n", "1,663 tokens\n"),
        ("1.2 MB\n", "1.3 MB\n"),
        ("exact\n", "not exact\n"),
        ("a.c\n", "abc\n"),
    ],
)
def test_what_is_said_is_not_alike(expected: str, actual: str) -> None:
    assert not matches(expected, actual)


def test_what_python_prints_varies_only_where_the_page_says_so() -> None:
    assert matches("took ... ms\nend\n", "took 12 ms\nend\n", strict=True)
    assert not matches("took 13 ms\n", "took 12 ms\n", strict=True)
    assert not matches("key 4aab1bacee41\n", "key 0123456789ab\n", strict=True)


def test_a_page_is_taken_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.txt -->\n\n```text\n$ no command\n```\n\n"
        "```console\n$ cat <<END\n> hello\n> END\nhello\n$ true\n```\n\n"
        "```python\nprint(1)\n```\n\n```\n1\n```\n\nWords.\n\n```\nnot printed\n```\n"
    )
    found = blocks(page)
    assert found[0] == Block("text", "$ no command\n", 3, "a.txt")
    hello, true = commands(found[1])
    assert (hello.command, hello.output) == ("cat <<END\nhello\nEND", "hello\n")
    assert (true.command, true.output) == ("true", None)
    assert [block.follows for block in found] == [False, True, True, True, False]
    assert anchors(page) == set()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```console\n$ echo a\nb\n```\n", "the output"),
        ("```console\n$ false\n```\n", "exit code 1"),
        ("```console\n$ echo error: a\nerror: a\n```\n", "exit code 0"),
        ("```python\nprint(1)\n```\n", "the output"),
        ("```python\nprint(1)\n```\n\n```\n2\n```\n", "the output"),
    ],
)
def test_a_page_that_says_something_else_fails(text: str, fault: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=fault):
        Page(page, tmp_path / "run", tmp_path).run()


def test_what_a_command_exports_and_saves_is_there_for_the_next(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: deep/a.txt -->\n```text\nhello\n```\n\n"
        "```console\n$ export NAME=deep\n$ cd $NAME\n$ cat a.txt && pwd\n"
        "hello\n/home/you/kvnotes/deep\n```\n\n"
        "```python\nname = 'b.txt'\n```\n\n"
        "```python\nfrom pathlib import Path\n_ = Path(name).write_text('bye')\n```\n\n"
        "```console\n$ cat ../b.txt; echo\nbye\n$ echo $KVNOTES_HOME\n"
        "/home/you/.cache/kvnotes\n```\n"
    )
    Page(page, tmp_path / "run", tmp_path).run()
