"""Starting a vLLM server: its command, its environment, its end. No vLLM is needed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvnotes.errors import EngineError, PlanError, StorageError
from kvnotes.vllm import launch
from kvnotes.vllm.config import ConnectorConfig
from kvnotes.vllm.launch import (
    Installed,
    Launch,
    Plugin,
    Server,
    ServerOptions,
    arguments,
    environment,
    installed_in,
    named_distribution,
    num_threads,
    plan_launch,
)

CPU_BUILD = Installed("", "0.32.0", True)
FOLDER, DESCRIPTION = Path("/models/m"), Path("/models/m.safetensors")

FAKE = """
import http.server, os, signal, subprocess, sys, time
how, port = sys.argv[1], int(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
if how == "ends":
    print("no such model", flush=True)
    sys.exit(3)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
if how == "silent":
    time.sleep(60)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def said(found: Sequence[str], option: str) -> str:
    return found[found.index(option) + 1]


def given(options: ServerOptions) -> tuple[str, ...]:
    description = None if options.plugin is None else DESCRIPTION
    return arguments(options, FOLDER, description, port=8123, name="m")


# -- the command ---------------------------------------------------------------------------------


def test_a_stock_server_gets_its_model_and_no_plugin() -> None:
    found = given(ServerOptions(model="m", dtype="bfloat16", max_model_len=512))
    assert found[0] == str(FOLDER) and said(found, "--served-model-name") == "m"
    assert said(found, "--port") == "8123" and said(found, "--host") == "127.0.0.1"
    assert said(found, "--dtype") == "bfloat16" and said(found, "--block-size") == "32"
    assert said(found, "--max-model-len") == "512"
    assert {"--enforce-eager", "--enable-prompt-tokens-details"} <= set(found)
    assert not {"--kv-transfer-config", "--scheduler-cls"} & set(found)


def test_the_plugin_gets_what_it_was_told_and_can_read_it(tmp_path: Path) -> None:
    plugin = Plugin(
        store=tmp_path,
        tenant="shop",
        num_seam_tokens=4,
        allow_compile=True,
        allow_refresh=True,
    )
    found = given(ServerOptions(model="m", plugin=plugin))
    config = json.loads(said(found, "--kv-transfer-config"))
    assert config["kv_connector"] == "KVNotesConnector" and config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    read = ConnectorConfig.of(config["kv_connector_extra_config"])
    assert (read.model, read.store, read.tenant) == (DESCRIPTION, tmp_path, "shop")
    assert read.num_seam_tokens == 4 and read.remote is None
    assert read.allow_compile and read.allow_refresh
    assert said(found, "--scheduler-cls") == "kvnotes.vllm.scheduler.KVNotesScheduler"


def test_segments_at_one_place_need_no_scheduler_of_ours() -> None:
    found = given(ServerOptions(model="m", plugin=Plugin(any_place=False)))
    assert "--kv-transfer-config" in found and "--scheduler-cls" not in found


def test_further_arguments_come_last_and_win() -> None:
    assert given(ServerOptions(model="m", more=("--dtype", "float16")))[-2:] == (
        "--dtype",
        "float16",
    )


def test_compiling_the_model_is_a_wish() -> None:
    assert "--enforce-eager" not in given(ServerOptions(model="m", eager=False))


# -- the environment -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 3}, raising=False)


def test_threads_and_cache_of_the_cpu_build_are_always_said(tmp_path: Path) -> None:
    options = ServerOptions(model="m", threads=2, cache_gib=3)
    found = environment(options, CPU_BUILD, tmp_path)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2,3" and found["VLLM_CPU_KVCACHE_SPACE"] == "3"
    every = environment(ServerOptions(model="m"), CPU_BUILD, tmp_path)
    assert every["VLLM_CPU_OMP_THREADS_BIND"] == "2,3,5"
    assert num_threads(Launch((), found, "h", 1, tmp_path)) == 2


@pytest.mark.parametrize(
    ("said", "number"), [("", 0), ("0-1", 2), ("0,5,7", 3), ("0-3|4-7", 8), ("auto", 0)]
)
def test_threads_are_counted_in_any_form(
    said: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", said)
    assert num_threads(Launch((), {}, "h", 1, tmp_path)) == number


def test_another_build_binds_nothing(tmp_path: Path) -> None:
    found = environment(ServerOptions(model="m"), Installed("0.32.0", "", True), tmp_path)
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "PYTHONPATH"} & set(found)


def test_cpus_that_were_bound_before_stay_where_no_number_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3|4-7")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(
        ServerOptions(model="m"), CPU_BUILD, tmp_path
    )
    asked = environment(ServerOptions(model="m", threads=1), CPU_BUILD, tmp_path)
    assert asked["VLLM_CPU_OMP_THREADS_BIND"] == "2"


def test_more_threads_than_cpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="4 threads are asked for, this process may use 3 CPUs"):
        environment(ServerOptions(model="m", threads=4), CPU_BUILD, tmp_path)


def test_vllm_cpu_is_found_as_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    found = environment(ServerOptions(model="m"), CPU_BUILD, tmp_path)
    folder, before = found["PYTHONPATH"].split(os.pathsep)
    assert before == "/before"
    monkeypatch.syspath_prepend(folder)
    assert version("vllm") == "0.32.0+cpu"
    assert named_distribution(tmp_path, "0.32.0") == Path(folder)


def test_a_name_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        named_distribution(tmp_path, "0.32.0")


# -- what is installed ---------------------------------------------------------------------------


def distribution(folder: Path, name: str) -> None:
    info = folder / f"{name.replace('-', '_')}-0.32.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")


def test_what_an_interpreter_finds_is_asked_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, "vllm-cpu")
    (tmp_path / "kvnotes").mkdir()
    (tmp_path / "kvnotes" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = installed_in(Path(sys.executable))
    assert found.vllm_cpu == "0.32.0" and found.on_cpu and found.kvnotes


def test_an_interpreter_without_vllm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match="finds neither vllm nor vllm-cpu"):
        installed_in(Path(sys.executable))
    with pytest.raises(EngineError, match="is no Python that runs"):
        installed_in(tmp_path / "none")


def test_a_plugin_without_kvnotes_in_its_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "installed_in", lambda python: Installed("", "0.32.0", False))
    with pytest.raises(EngineError, match="has vLLM and no kvnotes"):
        plan_launch(ServerOptions(model="m", plugin=Plugin()))


# -- the process ---------------------------------------------------------------------------------


def server(tmp_path: Path, how: str, **more: Any) -> Server:
    port = launch._free_port("127.0.0.1")
    argv = (sys.executable, "-c", FAKE, how, str(port))
    made = Launch(argv, {"ADDED": "1"}, "127.0.0.1", port, tmp_path / "logs" / "log")
    return Server(made, **more)


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    except FileNotFoundError:
        return False


def ended(pid: int) -> bool:
    """Whether a process ends within a moment."""
    until = time.monotonic() + 5
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def child_of(made: Server) -> int:
    return int(made.launch.log.read_text().split()[1])


def test_a_server_answers_inside_the_block_and_is_gone_with_its_children_after(
    tmp_path: Path,
) -> None:
    with server(tmp_path, "well") as running:
        assert running.answers() and running.url.startswith("http://127.0.0.1:")
        child = child_of(running)
        assert alive(child)
    assert not running.answers() and ended(child)
    running.stop()


def test_a_server_that_does_not_end_by_itself_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.3)
    with server(tmp_path, "stubborn") as running:
        child = child_of(running)
    assert not running.answers() and ended(child)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    made = server(tmp_path, "ends")
    with pytest.raises(EngineError, match=r"ended with code 3 before it answered.*no such model"):
        made.start()
    assert ended(child_of(made))


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    made = server(tmp_path, "silent", start_s=1.0)
    with pytest.raises(EngineError, match="did not answer within 1 s"):
        made.start()
    assert ended(child_of(made))


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        server(tmp_path, "well").start()


def test_signals_to_this_process_group_do_not_reach_a_server(tmp_path: Path) -> None:
    with server(tmp_path, "well") as running:
        assert running._process is not None
        assert os.getpgid(running._process.pid) == running._process.pid != os.getpgid(0)
        running._process.send_signal(signal.SIGTERM)
        running._process.wait(10)
