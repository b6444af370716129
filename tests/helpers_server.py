"""A vLLM server with the embedded model, in processes of its own on a free port."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 600
"""A loaded machine with two cores takes two minutes."""
STOP_SECONDS = 60
NAME = "smollm2"


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Args:
        url: Its address.
        process: Its first process.
    """

    url: str
    process: subprocess.Popen[bytes]

    def metric(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric over the lines whose labels hold a text."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        found = [re.fullmatch(rf"{re.escape(name)}(\{{.*\}})? (\S+)", line) for line in lines]
        return sum(float(m[2]) for m in found if m and labels in (m[1] or ""))

    def hits(self) -> tuple[float, float]:
        """Return tokens that were looked up in the prefix cache, and those that were there."""
        return (
            self.metric("vllm:prefix_cache_queries_total"),
            self.metric("vllm:prefix_cache_hits_total"),
        )

    def hits_since(self, before: tuple[float, float]) -> tuple[float, float]:
        """Return what has been looked up and found since `hits` said so much."""
        now = self.hits()
        return now[0] - before[0], now[1] - before[1]

    def stop(self) -> None:
        """End it, and wait for that."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(model: Path, log: Path, options: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Start a server, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
        *("--max-model-len", "4096", "--enable-prompt-tokens-details"),
        *options,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    server = RunningServer(f"http://127.0.0.1:{port}", process)
    try:
        _wait(server, log)
        yield server
    finally:
        server.stop()


def _wait(server: RunningServer, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            if httpx.get(f"{server.url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
