"""Hand-made segments and headers without a model, and files taken apart and joined by hand.

What a test calls hostile is made from bytes here, not by the code that writes files.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.spec import LayerSpec, ModelIdentity, ModelSpec, RopeSpec
from kvnotes.store.header import (
    Creation,
    FieldSpan,
    Payload,
    Provenance,
    SegmentHeader,
    digest_text,
    make_header,
)

PAGE = 4096
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def identity(
    dtype: str = "float32", *, num_layers: int = 1, num_kv_heads: int = 1, head_dim: int = 2
) -> ModelIdentity:
    """Who a hand-made segment says it is of."""
    spec = ModelSpec(
        model_type="llama",
        layers=(LayerSpec("full", num_kv_heads, head_dim),) * num_layers,
        num_attention_heads=num_kv_heads,
        hidden_size=num_kv_heads * head_dim,
        vocab_size=50,
        max_positions=4096,
        dtype=dtype,
        ropes=(RopeSpec("default", head_dim, "half", "0" * 64),),
        constants=(("rms_norm_eps", "1e-06"),),
        num_parameters=1000,
    )
    return ModelIdentity(spec, "1" * 64, adapter="lora", quantization="none")


def run_of(num_tokens: int, num_preamble: int = 0) -> Run:
    """Tokens computed behind their own preamble."""
    ids = tuple(index * 7 % 50 for index in range(num_preamble + num_tokens))
    return Run(ids).cut(num_preamble, len(ids))


def segment_of(
    num_tokens: int = 3, num_preamble: int = 0, dtype: str = "float32", seed: int = 0, **shape: Any
) -> KVSegment:
    """A segment of random K/V."""
    who = identity(dtype, **shape)
    random = torch.Generator().manual_seed(seed)

    def layers() -> tuple[Tensor, ...]:
        return tuple(
            torch.randn((layer.num_kv_heads, num_tokens, layer.head_dim), generator=random).to(
                DTYPES[dtype]
            )
            for layer in who.spec.layers
        )

    preamble = tuple(index * 7 % 50 for index in range(num_preamble))
    run = run_of(num_tokens, num_preamble)
    return KVSegment(run, who, {"keys": layers(), "values": layers()}, preamble_ids=preamble)


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements, as they lie in a file."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def facts_of(segment: KVSegment) -> tuple[Any, ...]:
    """Everything that makes a segment what it is, bit by bit."""
    return (
        segment.run.digest,
        segment.run.token_ids,
        segment.run.start,
        segment.run.altered,
        segment.preamble_ids,
        segment.identity.fingerprint,
        tuple((t.dtype, tuple(t.shape), raw_bytes(t)) for t in segment.keys),
        tuple((t.dtype, tuple(t.shape), raw_bytes(t)) for t in segment.values),
    )


def canonical(value: object) -> str:
    """JSON with sorted keys and no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def taken_apart(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The outer header of a file, and the bytes of its tensors."""
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def joined(outer: object, data: bytes = b"", *, page: int = PAGE) -> bytes:
    """A file with this outer header: an object, or its text."""
    text = outer if isinstance(outer, str) else json.dumps(outer)
    header = text.encode("utf-8", "surrogatepass")
    header += b" " * (-(8 + len(header)) % page)
    return struct.pack("<Q", len(header)) + header + data


def with_header(content: bytes, change: Callable[[Any], object]) -> bytes:
    """A file whose inner header was changed: canonical, and its own digest fits again."""
    outer = taken_apart(content)[0]
    header = json.loads(outer["__metadata__"]["kvnotes"])
    change(header)
    return with_text(content, canonical(header))


def with_text(content: bytes, text: str) -> bytes:
    """A file with another text as its inner header, and the digest of that."""
    outer, data = taken_apart(content)
    outer["__metadata__"]["kvnotes"] = text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    outer["__metadata__"]["sha256"] = digest
    return joined(outer, data)


def edit_outer(path: Path, change: Callable[[Any], object]) -> Path:
    """Change the outer header of a file."""
    outer, data = taken_apart(path.read_bytes())
    change(outer)
    path.write_bytes(joined(outer, data))
    return path


def edit_text(path: Path, name: str, change: Callable[[Any], object]) -> Path:
    """Change the JSON of one metadata text, and keep it in our own form."""

    def edit(outer: Any) -> None:
        data = json.loads(outer["__metadata__"][name])
        change(data)
        outer["__metadata__"][name] = canonical(data)

    return edit_outer(path, edit)


# -- headers -------------------------------------------------------------------------------

TEXT = "Never sell below \u20ac 5.\n"
SOURCE = Provenance(
    name="policy",
    version=3,
    text=TEXT,
    text_sha256=digest_text(TEXT),
    role="system",
    tokenizer="t" * 64,
    spans=(FieldSpan(name="limit", value="5", start=1, stop=2),),
    variant=(("country", "France"),),
    family="f" * 64,
)
CREATED = Creation(at="2026-01-02T03:04:05+00:00", versions=(("kvnotes", "1"), ("torch", "2")))


PLAIN: dict[str, Any] = {
    "kind": "segment",
    "tenant": "a",
    "provenance": Provenance(),
    "payload": Payload(source_dtype="float32"),
    "created": CREATED,
    "digests": ("a" * 64, "b" * 64),
}
HALF = Payload(source_dtype="float16")


def header(**changes: Any) -> SegmentHeader:
    """A header in which nothing is empty."""
    return make_header(segment_of(3, 2), **{**PLAIN, "provenance": SOURCE, **changes})


TEXT_OF_HEADER = header().to_json()


def changed(change: Callable[[Any], object]) -> str:
    """The text of that header with a change."""
    data = json.loads(TEXT_OF_HEADER)
    change(data)
    return canonical(data)


def at(path: str, value: Any) -> Callable[[Any], None]:
    """Set one value: `identity.spec.layers.0.kind`."""

    def change(data: Any) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for step in way:
            data = data[step]
        data[last] = value

    return change


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested data with its path."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in parts:
        here = f"{path}.{name}".lstrip(".")
        if isinstance(part, (dict, list)) and part:
            yield from leaves(part, here)
        else:
            yield here, part


def of_model(**changes: Any) -> str:
    """A header that fits its model in all but these: its fingerprint is right."""

    def change(data: Any) -> None:
        for path, value in changes.items():
            at("identity.spec." + path.replace("__", "."), value)(data)
        spec = dict(data["identity"]["spec"])
        del spec["num_parameters"], spec["limit_reason"]
        facts = {**spec, "weights": "1" * 64, "adapter": "lora", "quantization": "none"}
        data["fingerprint"] = hashlib.sha256(canonical(facts).encode()).hexdigest()

    return changed(change)
