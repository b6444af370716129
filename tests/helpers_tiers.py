"""Segments whose K/V follow from their name, and processes that work on one store.

A segment's tensors are a function of its name alone: whoever gets one back can tell
whether every bit is what its key must hold. Processes come from a fork server that has
torch loaded: they start in some milliseconds.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from helpers_store import DTYPES, identity

from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.spec import ModelIdentity
from kvnotes.store import KVStore, Provenance, digest_text

IDENTITY = identity(num_kv_heads=1, head_dim=4)
OTHER = identity(num_kv_heads=1, head_dim=4, num_layers=2)

PREAMBLE = (1, 2, 3)


def ids_of(name: str, num_tokens: int = 8) -> tuple[int, ...]:
    """Tokens that only this name has."""
    state = hashlib.shake_256(name.encode()).digest(num_tokens)
    return tuple(byte % 50 for byte in state)


def run_named(name: str, num_tokens: int = 8, *, preamble: tuple[int, ...] = ()) -> Run:
    """The run of a compiled segment."""
    whole = Run((*preamble, *ids_of(name, num_tokens)))
    return whole.cut(len(preamble), len(whole))


def named(
    name: str,
    num_tokens: int = 8,
    *,
    who: ModelIdentity = IDENTITY,
    preamble: tuple[int, ...] = (),
) -> KVSegment:
    """The segment of a name: every bit follows from name, preamble and model."""
    seed = hashlib.sha256(f"{name} {preamble} {who.fingerprint}".encode()).digest()[:7]
    random = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
    dtype = DTYPES[who.spec.dtype]
    layers = [
        torch.randn((layer.num_kv_heads, num_tokens, layer.head_dim), generator=random).to(dtype)
        for layer in (*who.spec.layers, *who.spec.layers)
    ]
    count = len(who.spec.layers)
    run = run_named(name, num_tokens, preamble=preamble)
    return KVSegment(
        run,
        who,
        {"keys": tuple(layers[:count]), "values": tuple(layers[count:])},
        preamble_ids=preamble,
    )


def variant(
    text: str, value: str, num_tokens: int = 8, *, who: ModelIdentity = IDENTITY
) -> tuple[KVSegment, Provenance]:
    """One of a family: the same text behind another value of a field."""
    segment = named(text, num_tokens, who=who, preamble=ids_of(value, 4))
    source = Provenance(
        name=text,
        text=text,
        text_sha256=digest_text(text),
        variant=(("field", value),),
        family=digest_text("family " + text),
    )
    return segment, source


def same(left: KVSegment | None, right: KVSegment) -> bool:
    """Whether two segments are the same, bit by bit."""
    return left is not None and (
        left.run.digest == right.run.digest
        and left.preamble_ids == right.preamble_ids
        and left.identity.fingerprint == right.identity.fingerprint
        and all(map(torch.equal, (*left.keys, *left.values), (*right.keys, *right.values)))
    )


def find(store: KVStore, name: str, num_tokens: int = 8, **facts: Any) -> KVSegment | None:
    """Look a name up; what is found must be it, bit by bit."""
    who = facts.get("who", IDENTITY)
    preamble = facts.get("preamble", ())
    found = store.find(who, run_named(name, num_tokens, preamble=preamble))
    assert found is None or same(found, named(name, num_tokens, who=who, preamble=preamble))
    return found


class Compiler:
    """Compiles names, and counts it in a file that processes share."""

    def __init__(self, log: Path, before: Callable[[], None] = lambda: None) -> None:
        self.log = log
        self.before = before

    def get(self, store: KVStore, name: str, num_tokens: int = 8) -> KVSegment:
        """Ask a store for a name."""

        def compile() -> KVSegment:
            self.before()
            file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(file, f"{name}\n".encode())
            os.close(file)
            return named(name, num_tokens)

        run = run_named(name, num_tokens)
        found = store.get_or_compile(IDENTITY, run, compile, Provenance(name=name))
        assert same(found, named(name, num_tokens))
        return found

    @property
    def names(self) -> list[str]:
        """What was compiled, in order."""
        return self.log.read_text().split() if self.log.exists() else []


# -- processes -----------------------------------------------------------------------------


@cache
def _processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvnotes.store.store", "kvnotes.store.saving"])  # and torch
    return context


def start(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a process that calls a function of a module."""
    process: BaseProcess = _processes().Process(target=_called, args=(work, arguments))
    process.start()
    return process


def barrier(num: int) -> Any:
    """What `num` processes wait for until all are there."""
    return _processes().Barrier(num)


def finish(*processes: BaseProcess, seconds: float = 60.0) -> None:
    """Wait for processes; each must have ended well."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    assert codes == [0] * len(processes), codes


def _called(work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    work(*arguments)
    sys.stdout.flush()
