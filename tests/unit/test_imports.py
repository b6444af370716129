"""The modules' order: each imports only those above it, and not what it must not see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "kvnotes"

ORDER = (
    "errors",
    "settings",
    "prompt",
    "lint",
    "plan",
    "spec",
    "rope_kernel",
    "rope",
    "segment",
    "engine",
    "store",
    "fidelity",
    "gate",
    "session",
    "library",
    "memory",
    "agent",
    "probes",
    "vllm",
    "bench",
    "server",
    "cli",
)

MUST_NOT_SEE = {
    "errors": {"torch", "transformers", "numpy"},
    "settings": {"torch", "transformers", "numpy"},
    "prompt": {"torch", "transformers"},
    "lint": {"torch", "transformers"},
    "plan": {"torch", "transformers", "kvnotes.prompt"},
    "server": {"torch"},
    "cli": {"torch"},
}

ONLY_HERE = {"transformers": "engine"}

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    """The name in ORDER that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The absolute name of everything that a file imports, at any depth of its code."""
    package = ["kvnotes", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def faults(path: Path) -> list[str]:
    own = module_of(path)
    found = []
    for name in imported(path):
        if is_below(name, "kvnotes") and "." in name:
            other = name.split(".")[1]
            if other in ORDER and ORDER.index(other) > ORDER.index(own):
                found.append(f"{own} stands above {other}, and imports it")
        found += [
            f"{own} must not see {name}"
            for seen in MUST_NOT_SEE.get(own, ())
            if is_below(name, seen)
        ]
        found += [
            f"only {home} may import {package}"
            for package, home in ONLY_HERE.items()
            if is_below(name, package) and own != home
        ]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_what_stands_above_it(path: Path) -> None:
    assert module_of(path) in ORDER, f"{module_of(path)} has no place in the order"
    assert faults(path) == []


def test_import_below_or_of_a_hidden_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    file = tmp_path / "plan" / "steps.py"
    file.parent.mkdir()
    file.write_text(
        "from ..prompt import Span\nfrom kvnotes import segment\n"
        "def f():\n    import torch.nn\n    from transformers.utils import logging\n"
    )
    assert faults(file) == [
        "plan must not see kvnotes.prompt.Span",
        "plan stands above segment, and imports it",
        "plan must not see torch.nn",
        "plan must not see transformers.utils.logging",
        "only engine may import transformers",
    ]
