"""Fuzz the reader of segment files: refuse or read, and nothing else.

    python bench/fuzz_format.py --seconds 300

Files and headers are mutated as bytes and as JSON (values, keys, order, types), with digests,
fingerprints and canonical form repaired now and then, so that mutations get past the first
check. Allowed are a refusal (SegmentFormatError, TrustError) and a segment that is what its file
says, judged here from the bytes alone. Anything else, and any input that takes longer than
10 seconds, is a crash: it is saved with its input, and the exit code is 1.

With the package atheris the search is guided by coverage; `--engine own` does without.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from fuzz_mutations import PAGE, canonical, mutated

from kvnotes.errors import SegmentFormatError, TrustError
from kvnotes.plan import Run
from kvnotes.segment import KVSegment, Tensors
from kvnotes.spec import LayerSpec, ModelIdentity, ModelSpec, RopeSpec

if find_spec("atheris"):
    import atheris

    watched = atheris.instrument_imports(include=["kvnotes.store", "json"])
else:
    watched = nullcontext()
with watched:
    from kvnotes.store import Provenance, Trust, digest_text, open_segment, save_segment
    from kvnotes.store.header import FieldSpan, SegmentHeader

SLOW_SECONDS = 10.0
TRUST = Trust(signing_key=bytes(range(32)), encryption_key=bytes(32))


# -- seeds ---------------------------------------------------------------------------------


def seeds(folder: Path) -> list[bytes]:
    """Files of every kind, as small as they get."""
    spec = ModelSpec(
        model_type="llama",
        layers=(LayerSpec("full", 1, 2),),
        num_attention_heads=1,
        hidden_size=2,
        vocab_size=50,
        max_positions=64,
        dtype="float32",
        ropes=(RopeSpec("yarn", 2, "half", "0" * 64, attention_factor=1.5),),
        constants=(("hidden_act", "silu"), ("rms_norm_eps", "1e-06")),
    )
    tensor = torch.tensor([[[1.0, -2.0], [0.5, 0.25], [3.0, 1e-6]]])
    text = "Never sell below \u20ac 5 to {you}."
    source = Provenance(
        name="policy",
        text=text,
        text_sha256=digest_text(text),
        role="system",
        spans=(FieldSpan(name="price", value="5", start=1, stop=2),),
        variant=(("country", "France"),),
    )
    whole = Run((7, 8, 9, 10, 11))
    tensors: Tensors = {"keys": (tensor,), "values": (tensor,)}
    compiled = KVSegment(
        whole.cut(2, 5), ModelIdentity(spec, "1" * 64), tensors, preamble_ids=(7, 8)
    )
    part = KVSegment(compiled.run, compiled.identity, tensors)
    ways: list[tuple[KVSegment, dict[str, Any]]] = [
        (compiled, {"provenance": source, "tenant": "shop"}),
        (compiled, {"int8": True}),
        (part, {"kind": "run"}),
        (compiled, {"trust": Trust(signing_key=TRUST.signing_key)}),
        (compiled, {"trust": Trust(encryption_key=TRUST.encryption_key)}),
        (compiled, {"trust": TRUST}),
    ]
    found = []
    for segment, options in ways:
        save_segment(folder / "seed", segment, **options)
        found.append((folder / "seed").read_bytes())
    return found


# -- the judge -----------------------------------------------------------------------------


class Reader:
    """Reads one input after the other through a file, as everybody does."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "input"
        self.outcomes: Counter[str] = Counter()

    def read(self, content: bytes) -> None:
        """Read an input.

        Raises:
            Exception: Of any class, where the reader does what it should not.
        """
        started = time.monotonic()
        self.path.write_bytes(content)
        try:
            opened = open_segment(self.path, trust=TRUST)
            self.outcomes["header accepted"] += 1
            opened.verify()
            segment = opened.segment()
        except (SegmentFormatError, TrustError) as error:
            self.outcomes[type(error).__name__] += 1
            if not (error.message.isprintable() and len(error.message) < 1000 and error.hint):
                raise AssertionError(f"a message as no message should be: {error!r}") from error
        else:
            self.outcomes["read"] += 1
            judge(bytes(opened.content), opened.header, segment)
        if time.monotonic() - started > SLOW_SECONDS:
            raise AssertionError(f"reading took {time.monotonic() - started:.0f} s")


def judge(content: bytes, header: SegmentHeader, segment: KVSegment) -> None:
    """Compare a segment with the bytes of its plain file, by nothing but the specification."""
    size = struct.unpack("<Q", content[:8])[0]
    outer = json.loads(content[8 : 8 + size])
    metadata = outer.pop("__metadata__")
    text = metadata["kvnotes"]
    said = json.loads(text)
    assert canonical(said) == text == header.to_json()
    assert hashlib.sha256(text.encode()).hexdigest() == metadata["sha256"]
    assert (8 + size) % PAGE == 0 and list(segment.run.token_ids) == said["token_ids"]
    assert list(segment.preamble_ids) == said["preamble_ids"] and said["kind"] == "segment"
    raw = {}
    for entry in said["tensors"]:
        start, stop = outer.pop(entry["name"])["data_offsets"]
        raw[entry["name"]] = content[8 + size + start : 8 + size + stop]
        assert hashlib.sha256(raw[entry["name"]]).hexdigest() == entry["sha256"]
    assert not outer
    if said["payload"]["kind"] != "int8":
        for name, layers in (("keys", segment.keys), ("values", segment.values)):
            for index, layer in enumerate(layers):
                found = layer.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert found == raw[f"{name}.{index}"]
    assert all(bool(torch.isfinite(t).all()) for t in segment.keys + segment.values)
    run = hashlib.sha256(said["attended"].encode())
    run.update(struct.pack(f"<{len(said['token_ids']) + 1}q", said["start"], *said["token_ids"]))
    if said["altered"]:
        run.update(b"altered " + said["altered"].encode())
    assert run.hexdigest() == segment.run.digest
    facts = ["kvnotes", 1, said["kind"], said["tenant"], said["fingerprint"], run.hexdigest()]
    assert header.key == hashlib.sha256(canonical(facts).encode()).hexdigest()


# -- engines -------------------------------------------------------------------------------


def fuzz_own(files: list[bytes], reader: Reader, args: argparse.Namespace) -> int:
    """Mutate the seeds, and what was read or got far, over and over."""
    chance = random.Random(args.seed)
    pool, crashes, executions = list(files), 0, 0
    end = time.monotonic() + args.seconds
    while time.monotonic() < end and crashes < args.max_crashes:
        content = mutated(chance.choice(pool if chance.random() < 0.3 else files), chance)
        before = reader.outcomes["header accepted"]
        try:
            reader.read(content)
        except Exception:  # this is what is looked for
            crashes += 1
            keep(content, traceback.format_exc(), args.out)
        executions += 1
        if reader.outcomes["header accepted"] > before and len(content) < 4 * PAGE:
            pool.append(content)
            if len(pool) > 2000:
                del pool[chance.randrange(len(files), len(pool))]
    report(executions, args, reader, crashes)
    return 1 if crashes else 0


def fuzz_atheris(files: list[bytes], reader: Reader, args: argparse.Namespace, folder: Path) -> int:
    """Let libFuzzer choose what to mutate; it ends the process itself."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for index, content in enumerate(files):
        (corpus / str(index)).write_bytes(content)
    end = time.monotonic() + args.seconds
    executions = 0

    def one(data: bytes) -> None:
        nonlocal executions
        executions += 1
        try:
            reader.read(data)
        except Exception:
            keep(data, traceback.format_exc(), args.out)
            report(executions, args, reader, 1)
            raise
        if time.monotonic() >= end:
            report(executions, args, reader, 0)
            sys.stdout.flush()
            os._exit(0)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        return mutated(data, random.Random(seed))[:max_size]

    # one mutation at a time: several of ours are in one already
    options = ["-max_len=65536", "-mutate_depth=1", "-cross_over=0", "-rss_limit_mb=8000"]
    options += [f"-seed={args.seed or 1}", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


def keep(content: bytes, text: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(content).hexdigest()[:16]
    (folder / f"{name}.bin").write_bytes(content)
    (folder / f"{name}.txt").write_text(text)
    print(f"crash: {folder / name}.bin\n{text}", file=sys.stderr)


def report(executions: int, args: argparse.Namespace, reader: Reader, crashes: int) -> None:
    facts = {
        "engine": args.engine,
        "seconds": args.seconds,
        "executions": executions,
        "executions_per_s": round(executions / args.seconds),
        "crashes": crashes,
        "outcomes": dict(reader.outcomes),
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(facts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("auto", "own", "atheris"), default="auto")
    parser.add_argument("--max-crashes", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="inputs that crashed")
    parser.add_argument("--input", type=Path, help="read one saved input again, and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.engine == "auto":
        args.engine = "atheris" if find_spec("atheris") else "own"
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        folder = Path(name)
        reader = Reader(folder)
        if args.input is not None:
            reader.read(args.input.read_bytes())
            print(dict(reader.outcomes))
            return 0
        files = seeds(folder)
        for content in files:
            reader.read(content)
        reader.outcomes.clear()
        if args.engine == "atheris":
            return fuzz_atheris(files, reader, args, folder)
        return fuzz_own(files, reader, args)


if __name__ == "__main__":
    sys.exit(main())
