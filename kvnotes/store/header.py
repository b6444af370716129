"""The header of a segment file: what the K/V are, and of whom.

Owns `SegmentHeader`, its canonical JSON and what makes one valid on its own. Does not read
files and holds no tensors; `docs/format.md` is the specification.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import kvnotes
from kvnotes.errors import SegmentFormatError
from kvnotes.plan import Run
from kvnotes.plan.lineage import digest_run
from kvnotes.spec import ModelIdentity, ModelSpec
from kvnotes.store.container import ITEMSIZE
from kvnotes.store.untrusted import DAMAGED, bounded_json, check_cost, problem, quoted, texts

if TYPE_CHECKING:  # with torch
    from kvnotes.segment import KVSegment

FORMAT_VERSION = 1
MAX_TOKENS = 4 << 20
"""Most tokens of one segment."""
MAX_TEXT = 8 << 20
"""Longest text a header carries, in characters."""

SegmentKind = Literal["segment", "run"]
PayloadKind = Literal["exact", "converted", "int8"]

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0, lt=1 << 48)]
_TokenIds = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], Field(max_length=MAX_TOKENS)
]
# no control characters: names are printed, and a terminal obeys them
_Name = Annotated[str, Field(max_length=1000, pattern="^[^\\x00-\\x1f\\x7f-\\x9f]*$")]
_Value = Annotated[str, Field(max_length=MAX_TEXT)]
_Time = Annotated[str, Field(pattern="^[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}[+]00:00$")]
DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""How safetensors calls the dtypes of a model."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TensorEntry(_Part):
    """One tensor of the file; they stand in this order, without gaps."""

    name: _Name
    dtype: Literal["F32", "F16", "BF16", "I8"]
    shape: Annotated[tuple[Annotated[int, Field(ge=1, lt=1 << 48)], ...], Field(max_length=4)]
    sha256: _Digest

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class FieldSpan(_Part):
    """A field's value in the segment: tokens `[start, stop)` of `token_ids`."""

    name: _Name
    value: _Value
    start: _Count
    stop: _Count


class Provenance(_Part):
    """The text that was compiled, for people and for `verify`.

    Attributes:
        name: Name of the skill or segment, "" for none.
        version: Version of the skill, 0 for none.
        text: The text; "" where it is stored once for a family of variants.
        text_sha256: SHA-256 of the text, also where it is not here.
        role: Role of the message the segment is; "" for text inside a message.
        tokenizer: SHA-256 of tokenizer and chat template, "" if not known.
        spans: Values of fields in the text.
        variant: Values of the fields in the preamble.
        family: Variants of one text share this key; "" for a segment of its own.
    """

    name: _Name = ""
    version: _Count = 0
    text: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    text_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    role: _Name = ""
    tokenizer: _Name = ""
    spans: tuple[FieldSpan, ...] = ()
    variant: tuple[tuple[_Name, _Value], ...] = ()
    family: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""


class Payload(_Part):
    """How the tensors relate to what was computed.

    Attributes:
        kind: `exact`: bit by bit. `converted`: rounded once to another dtype. `int8`: rounded
            to 8 bits, one scale per head and token.
        source_dtype: The dtype it was computed in.
        max_error: Largest absolute error of a tensor over its largest absolute value; the
            largest over the tensors. Stated for `int8` only, 0 for the others.
        rms_error: The same for root mean squares.
    """

    kind: PayloadKind = "exact"
    source_dtype: _Name
    max_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    rms_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Creation(_Part):
    """When and by what the file was made; no part of its identity."""

    at: _Time
    versions: tuple[tuple[_Name, _Name], ...]

    @classmethod
    def now(cls, versions: tuple[tuple[str, str], ...] = ()) -> Creation:
        """Return the facts of a file that is made now."""
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(at=at, versions=(("kvnotes", kvnotes.__version__), *versions))


class SegmentHeader(_Part):
    """Everything about a segment but its tensors.

    Attributes:
        version: Version of the format.
        kind: `segment`: compiled behind its own preamble, may be spliced anywhere. `run`: part
            of a saved session, of no use anywhere else.
        fingerprint: SHA-256 of `identity`.
        identity: The model that computed it.
        tenant: Whose it is; "" is shared by all.
        token_ids: The tokens.
        preamble_ids: Tokens the segment was compiled behind.
        start: Position of the first token.
        attended: Digest of what the tokens saw before them.
        altered: Part of the key of inexact K/V, see `Payload`; "" for exact ones.
        layer_kinds: One entry per layer.
    """

    version: Literal[1] = 1
    kind: SegmentKind
    fingerprint: _Digest
    identity: ModelIdentity
    tenant: _Name = ""
    token_ids: _TokenIds
    preamble_ids: _TokenIds = ()
    start: _Count
    attended: _Digest
    altered: _Name = ""
    layer_kinds: tuple[_Name, ...]
    provenance: Provenance
    payload: Payload
    created: Creation
    tensors: tuple[TensorEntry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> SegmentHeader:
        wrong = next(self._contradictions(), None)
        if wrong:
            raise ValueError(wrong)
        return self

    def _contradictions(self) -> Iterator[str]:
        if not self.token_ids:
            yield "it has no tokens"
        if self.identity.fingerprint != self.fingerprint:
            yield f"its fingerprint {self.fingerprint[:12]} is not that of the model it describes"
        kinds = tuple(layer.kind for layer in self.identity.spec.layers)
        if self.layer_kinds != kinds:
            yield f"its layer_kinds {self.layer_kinds[:3]} differ from the model's {kinds[:3]}"
        yield from _layer_contradictions(self.identity.spec)
        if not all(text.isprintable() for text in texts(asdict(self.identity))):
            yield "its model is described with characters that cannot be printed"
        yield from self._payload_contradictions()
        if max(self.token_ids + self.preamble_ids, default=0) >= self.identity.spec.vocab_size:
            yield f"a token id lies outside of the vocabulary of {self.identity.spec.vocab_size}"
        if self.kind == "segment":
            run = self.run()
            if (run.start, run.attended) != (self.start, self.attended):
                yield "it was computed behind other tokens than its declared preamble"
        elif self.preamble_ids:
            yield "a run has no preamble of its own"
        if self.start + len(self.token_ids) > self.identity.spec.max_positions:
            yield "it is longer than the context of its model"
        expected = tensor_shapes(self.identity, len(self.token_ids), self.payload.kind)
        found = [(t.name, t.dtype, t.shape) for t in self.tensors]
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
            yield f"{len(found)} tensors, {len(expected)} expected; they differ at number {place}"
        for span in self.provenance.spans:
            if not span.start <= span.stop <= len(self.token_ids):
                yield f"the span of field {span.name!r} lies outside of its tokens"
        text = self.provenance.text
        if text and digest_text(text) != self.provenance.text_sha256:
            yield "its text is not the one whose digest it states"

    def _payload_contradictions(self) -> Iterator[str]:
        payload, dtype = self.payload, self.identity.spec.dtype
        if payload.source_dtype not in DTYPE_CODES:
            yield f"K/V computed in {payload.source_dtype!r}, which has no place in this format"
        if self.altered != alteration(payload, dtype):
            yield f"it is altered {self.altered!r} with a payload of kind {payload.kind!r}"
        if (payload.kind == "converted") == (payload.source_dtype == dtype):
            yield (
                f"{payload.kind} K/V computed in {payload.source_dtype!r} and stored for a model "
                f"of dtype {dtype!r}"
            )
        if payload.kind != "int8" and (payload.max_error or payload.rms_error):
            yield f"an error is stated for {payload.kind} K/V"

    def run(self, context: Run | None = None) -> Run:
        """Return the run of a compiled segment.

        Args:
            context: For a part of a session: the run with its whole lineage, to be checked.

        Raises:
            SegmentFormatError: The lineage is another one, or not given for a part of a session.
        """
        if context is None and self.kind == "run":
            raise SegmentFormatError(
                f"the file holds {len(self.token_ids)} tokens of a saved session, and says by "
                "digest only what they saw before",
                hint="load the session; a slice of a conversation is no segment",
            )
        if context is None:
            whole = Run((*self.preamble_ids, *self.token_ids))
            cut = whole.cut(len(self.preamble_ids), len(whole))
            return Run(cut.token_ids, cut.start, cut.context, self.altered)
        if context.digest != self.run_digest:
            raise SegmentFormatError(
                f"the file holds the run {self.run_digest[:12]}, {context.digest[:12]} is wanted",
                hint="the session's files were mixed up; save it again",
            )
        return context

    @property
    def run_digest(self) -> str:
        """Content key of the run, with its lineage."""
        return digest_run(self.attended, self.start, self.token_ids, self.altered)

    @property
    def key(self) -> str:
        """Name of the segment in every store: full SHA-256, 64 hex digits."""
        return content_key(self.kind, self.tenant, self.fingerprint, self.run_digest)

    @property
    def title(self) -> str:
        """Name, version and variant, for people."""
        source = self.provenance
        name = f"{source.name}@{source.version}" if source.version else source.name
        return " ".join([name, *(f"{field}={value}" for field, value in source.variant)]).strip()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_json(self) -> str:
        """Return the one canonical JSON text of this header."""
        return canonical_json(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, text: str, where: str) -> SegmentHeader:
        """Parse a header.

        Args:
            text: JSON text.
            where: Name of the file, for messages.

        Raises:
            SegmentFormatError: Not JSON, of a newer version, or not a header in its canonical form.
        """
        data = bounded_json(text, where)
        version = data.get("version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise SegmentFormatError(
                f"{where} has format version {quoted(version)}, this kvnotes reads "
                f"{FORMAT_VERSION}",
                hint="upgrade kvnotes, or compile the segment again",
            )
        check_cost(data, ("token_ids", "preamble_ids"), where)
        try:
            header = cls.model_validate_json(text)
        except ValidationError as error:
            raise SegmentFormatError(
                f"{where} has no valid header: {problem(error)}", hint=DAMAGED
            ) from error
        if header.to_json() != text:
            raise SegmentFormatError(
                f"{where} has a header that is not in its canonical form", hint=DAMAGED
            )
        return header


def make_header(
    segment: KVSegment,
    *,
    kind: SegmentKind,
    tenant: str,
    provenance: Provenance,
    payload: Payload,
    created: Creation,
    digests: tuple[str, ...],
) -> SegmentHeader:
    """Return the header of a segment whose tensors have these digests.

    Raises:
        SegmentFormatError: The format has no place for such a segment.
    """
    identity = segment.identity
    shapes = tensor_shapes(identity, segment.num_tokens, payload.kind)
    try:
        return SegmentHeader(
            kind=kind,
            fingerprint=identity.fingerprint,
            identity=identity,
            tenant=tenant,
            token_ids=segment.run.token_ids,
            preamble_ids=segment.preamble_ids,
            start=segment.run.start,
            attended=segment.run.attended,
            altered=alteration(payload, identity.spec.dtype),
            layer_kinds=tuple(layer.kind for layer in identity.spec.layers),
            provenance=provenance,
            payload=payload,
            created=created,
            tensors=tuple(
                TensorEntry(name=name, dtype=dtype, shape=shape, sha256=digest)
                for (name, dtype, shape), digest in zip(shapes, digests, strict=True)
            ),
        )
    except ValidationError as error:
        raise SegmentFormatError(
            f"the segment cannot be stored: {problem(error)}",
            hint="docs/format.md says what a header may hold",
        ) from error


def _layer_contradictions(spec: ModelSpec) -> Iterator[str]:
    """Yield what no layer of a model can be."""
    for number, layer in enumerate(spec.layers):
        sizes = (layer.num_kv_heads, layer.head_dim, layer.value_dim or 1)
        if min(sizes) < 1 or min(layer.index_dim, layer.window) < 0:
            yield f"layer {number} has sizes that none can have: {sizes}"
            return
        for name, index in layer.moves:
            if not 0 <= index < len(spec.ropes):
                yield f"layer {number} moves by a rotary embedding that it has not: {index}"
                return
            rope = spec.ropes[index]
            width = layer.shape(name, 1)[2]
            if rope.start < 0 or rope.rotary_dim < 1 or rope.start + rope.rotary_dim > width:
                yield f"layer {number} turns dimensions that its {name} have not"
                return


def tensor_shapes(
    identity: ModelIdentity, num_tokens: int, kind: PayloadKind
) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Return (name, dtype, shape) of every tensor, in the order of the file.

    Raises:
        SegmentFormatError: The model's dtype has no place in the format.
    """
    code = DTYPE_CODES.get(identity.spec.dtype)
    if code is None:
        raise SegmentFormatError(
            f"K/V of dtype {identity.spec.dtype!r} cannot be stored",
            hint=f"load the model as one of {', '.join(DTYPE_CODES)}",
        )
    result: list[tuple[str, Any, tuple[int, ...]]] = []
    for index, layer in enumerate(identity.spec.layers):
        for tensor in identity.spec.tensor_names:
            shape, name = layer.shape(tensor, num_tokens), f"{tensor}.{index}"
            if not math.prod(shape):
                continue  # this layer has none of them
            if kind == "int8":
                result += [(name, "I8", shape), (f"{name}.scale", "F16", (*shape[:2], 1))]
            else:
                result.append((name, code, shape))
    return result


def alteration(payload: Payload, dtype: str) -> str:
    """Return how the K/V of a payload differ from computed ones, as `Run.altered` says it."""
    own = {"exact": "", "int8": f"int8:{dtype}"}
    return own.get(payload.kind, f"from:{payload.source_dtype}")


def content_key(kind: SegmentKind, tenant: str, fingerprint: str, run_digest: str) -> str:
    """Return the key of a run's K/V: full SHA-256 over all that decides them."""
    text = canonical_json(["kvnotes", FORMAT_VERSION, kind, tenant, fingerprint, run_digest])
    return hashlib.sha256(text.encode()).hexdigest()


def digest_text(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def canonical_json(value: object) -> str:
    """Return JSON text with sorted keys and no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
