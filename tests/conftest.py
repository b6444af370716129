"""What every test gets: shapes checked, no network, one thread, and no silent skips."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# before the first import of transformers or kvnotes, which read them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("KVNOTES_HOME", str(ROOT / ".cache"))

from jaxtyping import install_import_hook  # noqa: E402

# shapes and types of every call are checked while tests run
install_import_hook("kvnotes", "beartype.beartype")

NUM_THREADS = 1
"""Two threads wait for each other in tiny products: 41 s against 6 s on a loaded machine."""


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    import torch

    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of the embedded model; the first run converts it into KVNOTES_HOME."""
    from kvnotes.engine.models import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL, progress=lambda what, done, total: None).path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The recorded data beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data")
    return folder


SKIPPED = "skipped without a declaration"


class SkipCheck:
    """Fails a CI run with a skipped test that tests/declared_skips.txt does not name."""

    def __init__(self, declared: list[str]) -> None:
        self.declared = declared
        self.undeclared: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.note(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.note(report.nodeid)

    def note(self, nodeid: str) -> None:
        if not any(nodeid.startswith(prefix) for prefix in self.declared):
            self.undeclared.append(nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # what a worker of pytest-xdist skipped while it collected, nobody else is told
        skipped = getattr(node, "workeroutput", {}).get(SKIPPED, [])
        self.undeclared += [nodeid for nodeid in skipped if nodeid not in self.undeclared]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[SKIPPED] = self.undeclared
            return
        if self.undeclared and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self.undeclared:
            terminalreporter.write_line(f"skipped, not in tests/declared_skips.txt: {nodeid}")


def declared_skips(path: Path) -> Iterator[str]:
    """The node id prefixes of a file of "prefix  reason" lines; # starts a comment."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            prefix, reason = re.split(r"\s{2,}", line.strip(), maxsplit=1)
            assert reason
            yield prefix


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI"):
        declared = list(declared_skips(ROOT / "tests" / "declared_skips.txt"))
        config.pluginmanager.register(SkipCheck(declared), "skip-check")
