"""Requests at given times, and when their tokens came back.

Open loop: a request is sent at its time, however many are on their way, and its times count from
there. Each has a thread and a connection of its own, by the standard library alone; what this
process needs of the CPU is measured, because the server runs beside it.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kvnotes.errors import PlanError

START_S = 0.05
"""Between the start of the threads and the first arrival."""

_SHOWN = 200
"""Characters of what a server says about a failure."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Args:
        url: `http://HOST:PORT`, a path behind it is kept.
    """

    url: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PlanError(
                f"{self.url!r} is no address of a server", hint="write http://127.0.0.1:8000"
            )

    @property
    def parts(self) -> SplitResult:
        """Its parts."""
        return urlsplit(self.url)

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        parts = self.parts
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert parts.hostname
        return kind(parts.hostname, parts.port, timeout=timeout_s)

    def path(self, name: str) -> str:
        """Return the path of a route such as `/metrics`."""
        return self.parts.path.rstrip("/") + name


@dataclass(frozen=True, slots=True)
class Timed:
    """A request and when it comes.

    Args:
        at: Seconds from the start.
        body: JSON of `/v1/completions`.
    """

    at: float
    body: bytes


@dataclass(slots=True)
class Record:
    """What became of a request; times in seconds from when it should have been sent.

    Args:
        at: When that was, from the start.
        lag: How much later it was sent.
        first: When its first token came.
        end: When its last one came, or it failed.
        num_tokens: How many came.
        text: What they say.
        error: Why it failed; "" where it did not.
    """

    at: float
    lag: float = 0.0
    first: float | None = None
    end: float = 0.0
    num_tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Drive:
    """A block of requests.

    Args:
        records: In order of arrival.
        wall_s: From the first arrival until the last end.
        cpu_s: CPU time of this process meanwhile.
    """

    records: list[Record]
    wall_s: float
    cpu_s: float


def arrivals(number: int, rate: float | None, seed: str) -> list[float]:
    """Return when requests come, in seconds: the first at 0, gaps as in a Poisson process.

    Args:
        number: How many.
        rate: Per second; None: all at once.
        seed: The same one gives the same times.
    """
    if rate is None:
        return [0.0] * number
    rng, times = random.Random(seed), [0.0]
    while len(times) < number:
        times.append(times[-1] + rng.expovariate(rate))
    return times


def drive(address: Address, requests: Sequence[Timed], *, timeout_s: float) -> Drive:
    """Send requests at their times and wait for all of them; one that fails is a record too."""
    cpu, start = time.process_time(), time.perf_counter() + START_S
    with ThreadPoolExecutor(len(requests), "kvnotes-load") as pool:
        given = [pool.submit(_send, address, r, start, timeout_s) for r in requests]
        records = [future.result() for future in given]
    wall = max(r.at + r.end for r in records) - min(r.at for r in records)
    return Drive(records, wall, time.process_time() - cpu)


def _send(address: Address, request: Timed, start: float, timeout_s: float) -> Record:
    due = start + request.at
    record = Record(request.at)
    connection = address.connect(timeout_s)
    time.sleep(max(0.0, due - time.perf_counter()))
    record.lag = time.perf_counter() - due
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", address.path("/v1/completions"), request.body, headers)
        _read(connection.getresponse(), record, due)
    except (OSError, http.client.HTTPException, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:_SHOWN]
    finally:
        connection.close()
    record.end = time.perf_counter() - due
    return record


def _read(response: http.client.HTTPResponse, record: Record, due: float) -> None:
    """Read a stream of server-sent events, token by token."""
    if response.status != 200:
        said = response.read(_SHOWN).decode(errors="replace")
        record.error = f"HTTP {response.status}: {said}"
        return
    ended, chunks = False, 0
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            break
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            record.error = f"the stream says {json.dumps(event['error'])}"[:_SHOWN]
            return
        for choice in event.get("choices", ()):
            if record.first is None:
                record.first = time.perf_counter() - due
            chunks += 1
            record.text += choice.get("text") or ""
        usage = event.get("usage") or {}
        record.num_tokens = int(usage.get("completion_tokens", chunks))
    if not ended:
        record.error = f"the stream ended after {chunks} chunks without [DONE]"
    elif record.first is None:
        record.error = "the stream held no token"


@dataclass(slots=True)
class Tally:
    """All requests of one arm at one rate.

    Args:
        records: Of all its blocks.
        wall_s: How long the blocks took together.
        cpu_s: CPU time of this process.
        arriving_s: Of these, how long requests were coming in.
    """

    records: list[Record] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    arriving_s: float = 0.0

    def add(self, block: Drive) -> None:
        """Count a block."""
        self.records += block.records
        self.wall_s += block.wall_s
        self.cpu_s += block.cpu_s
        self.arriving_s += max(record.at for record in block.records)

    @property
    def done(self) -> list[Record]:
        """Those that did not fail."""
        return [record for record in self.records if not record.error]

    @property
    def errors(self) -> list[str]:
        """Why others failed."""
        return [record.error for record in self.records if record.error]

    def ttft_ms(self, percent: int) -> float | None:
        """Return a percentile of the time to the first token; None if none was done."""
        return percentile([r.first * 1e3 for r in self.done if r.first is not None], percent)

    def e2e_ms(self, percent: int) -> float | None:
        """Return a percentile of the time to the last token."""
        return percentile([r.end * 1e3 for r in self.done], percent)

    def per_second(self, number: int) -> float:
        """Return a number as one per second."""
        return number / self.wall_s if self.wall_s else 0.0

    def goodput(self, bound_ms: float) -> float:
        """Return how many requests per second had their first token within a bound."""
        good = sum(1 for r in self.done if r.first is not None and r.first * 1e3 <= bound_ms)
        return self.per_second(good)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the value that so many percent of all do not exceed: one of them (nearest rank)."""
    if not values:
        return None
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]
