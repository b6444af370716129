"""Moving what a model cached between positions: post-RoPE keys, or their rotated part.

Owns the rotation; knows nothing of caches or models beyond a function that returns a
model's own cosines and sines. Which tensors carry positions, `LayerSpec.moves` says.

The rotation that takes a key from position p to q is the ratio of the model's own tables
at q and p. Taking the ratio, and scaling it to unit modulus, cancels YaRN's attention
scaling and reproduces the model's own float32 angle rounding, so a moved key equals the
key the model would have computed to 1e-7 at every distance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes.spec import Pairing, RopeSpec

RotaryTable = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [tokens], or [3, tokens] on three axes, to float32 cosines and sines
[tokens, rotary_dim/2], as the model has them."""

BLOCK_TOKENS = 512
"""Tokens rotated at a time: the block and its temporaries stay in the second-level cache
(SmolLM2: 0.4 MB of keys per block)."""

MIN_COMPILED_SIZE = 1 << 20
"""Numbers from which on keys are rotated by compiled code, in half of the time or less. It costs
a process 0.7 s to import numba, 1 s if nothing is compiled yet; eager torch rotates fewer numbers
in 3 ms."""

COMPILED_KINDS = {("cpu", dtype, 1) for dtype in (torch.float32, torch.bfloat16)}
"""Devices, dtypes and steps along the last axis that compiled code is for."""

MAX_CACHED_TURNS = 4
"""Rotations kept: one per segment in use; each is 2 x tokens x rotary_dim floats."""

MAX_CACHED_MATRICES = 256
"""The same for queries: one per place where a segment is read; 16 KiB each for 64 dimensions."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Rotation of a stretch of keys: `keys * cos + partners(keys) * sin`.

    Args:
        cos: Cosine of each rotated dimension's angle, float32 [tokens, rotary_dim].
        sin: Sines, negative in the first dimension of each pair.
    """

    cos: Float[Tensor, "tokens rotary_dim"]
    sin: Float[Tensor, "tokens rotary_dim"]


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding: its spec and its own tables."""

    spec: RopeSpec
    table: RotaryTable
    _turns: OrderedDict[tuple[int, int, int], Turn] = field(default_factory=OrderedDict, repr=False)
    _matrices: OrderedDict[tuple[int, int], Tensor] = field(default_factory=OrderedDict, repr=False)

    def turn(
        self, source: Int[Tensor, "*axes tokens"], target: Int[Tensor, "*axes tokens"]
    ) -> Turn:
        """Return the rotation from positions `source` to `target`, computed in float64.

        Positions have one axis, or three where images stand among the tokens.
        """
        ratio = self._unit(target) * self._unit(source).conj()
        ratio = ratio / ratio.abs()
        if self.spec.reversed:
            ratio = ratio.conj()
        cos, sin = ratio.real.float(), ratio.imag.float()
        if self.spec.pairing == "half":
            return Turn(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
        return Turn(cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2))

    def shift(self, source_start: int, target_start: int, num_tokens: int) -> Turn:
        """Return the rotation of a contiguous stretch; the last few are kept."""
        key = (source_start, target_start, num_tokens)
        found = self._turns.get(key)
        if found is None:
            steps = torch.arange(num_tokens)
            found = self.turn(steps + source_start, steps + target_start)
            self._turns[key] = found
            while len(self._turns) > MAX_CACHED_TURNS:
                self._turns.popitem(last=False)
        else:
            self._turns.move_to_end(key)
        return found

    def back(self, position: int, shift: int) -> Float[Tensor, "rotary_dim rotary_dim"]:
        """Return the rotation of queries that read keys where these stand, as a matrix.

        A key that is to be moved by `shift` gives the same score as the key where it stands,
        if the query is turned by as much the other way: `query @ matrix`.

        Args:
            position: Where the first of the keys belongs.
            shift: How far it is from there, in tokens.
        """
        key = (position, shift)
        if key not in self._matrices:
            turn = self.turn(torch.tensor([position]), torch.tensor([position - shift]))
            size = self.spec.rotary_dim
            whole = Turn(turn.cos.expand(size, -1), turn.sin.expand(size, -1))
            matrix = torch.empty(1, size, size)
            turn_keys([torch.eye(size)[None]], whole, replace(self.spec, start=0), [matrix])
            self._matrices[key] = matrix[0]
            while len(self._matrices) > MAX_CACHED_MATRICES:
                self._matrices.popitem(last=False)
        self._matrices.move_to_end(key)
        return self._matrices[key]

    def _unit(self, positions: Tensor) -> Tensor:
        cos, sin = self.table(positions)
        return torch.complex(cos.double(), sin.double())


def move_keys(
    keys: Float[Tensor, "kv_heads tokens head_dim"],
    source: Int[Tensor, " tokens"],
    target: Int[Tensor, " tokens"],
    rotary: Rotary,
) -> Float[Tensor, "kv_heads tokens head_dim"]:
    """Move one layer's post-RoPE keys from positions `source` to `target`.

    Args:
        keys: Keys as cached, rotated for `source`.
        source: Position each key has now, in tokens from the start of the sequence.
        target: Position each key should have.
        rotary: The model's rotary embedding.

    Returns:
        New keys, same dtype; computed in float32 and rounded once.

    Source: RoFormer (Su et al. 2021), section 3.4; unit-modulus rotation, so YaRN's scaling
        cancels.
    """
    out = torch.empty_like(keys)
    turn_keys([keys], rotary.turn(source, target), rotary.spec, [out])
    return out


class _Scratch:
    """Working memory of a rotation, reused from block to block and layer to layer.

    Fresh memory would cost more than the arithmetic: every block would fault its pages in.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.Size], Tensor] = {}

    def like(self, name: str, block: Tensor) -> Tensor:
        """Return float32 memory of a block's shape, under a name."""
        key = (name, block.shape)
        if key not in self._blocks:
            self._blocks[key] = torch.empty(block.shape, dtype=torch.float32)
        return self._blocks[key]


def turn_keys(
    layers: Sequence[Float[Tensor, "_ tokens _"]],
    turn: Turn,
    spec: RopeSpec,
    outs: Sequence[Float[Tensor, "_ tokens _"]],
) -> None:
    """Rotate the keys of all layers, each in one pass, into memory that does not overlap.

    Args:
        layers: Post-RoPE keys of each layer.
        turn: The rotation of each token, the same for all layers.
        spec: Which dimensions are rotated, and in which pairs.
        outs: Where each layer's result goes.
    """
    first, stop = spec.start, spec.start + spec.rotary_dim
    sources, targets = [], []
    for keys, out in zip(layers, outs, strict=True):
        if spec.rotary_dim < keys.shape[2]:
            out[..., :first] = keys[..., :first]
            out[..., stop:] = keys[..., stop:]
            keys, out = keys[..., first:stop], out[..., first:stop]
        sources.append(keys)
        targets.append(out)
    size = sum(keys.numel() for keys in sources)
    if size >= MIN_COMPILED_SIZE and all(map(_is_for_compiled, sources, targets)):
        num_threads = min(torch.get_num_threads(), size // MIN_COMPILED_SIZE)
        _turn_compiled(sources, turn, spec.pairing, targets, num_threads)
    else:
        _turn_eagerly(sources, turn, spec.pairing, targets)


def _is_for_compiled(keys: Tensor, out: Tensor) -> bool:
    kinds = [(x.device.type, x.dtype, x.stride(2)) for x in (keys, out)]
    return kinds[0] == kinds[1] and kinds[0] in COMPILED_KINDS


def _turn_compiled(
    layers: Sequence[Tensor],
    turn: Turn,
    pairing: Pairing,
    outs: Sequence[Tensor],
    num_threads: int,
) -> None:
    """Rotate in one pass, by code that is compiled when it is first used."""
    from kvnotes.rope_kernel import turn_layers  # numba: most processes never need it

    # a pair has one angle; the sine of its second dimension has the sign of the rotation
    half = turn.cos.shape[1] // 2
    second = slice(half, None) if pairing == "half" else slice(1, None, 2)
    cos, sin = turn.cos[:, second].contiguous(), turn.sin[:, second].contiguous()
    turn_layers(layers, outs, cos, sin, pairing=pairing, num_threads=num_threads)


def _turn_eagerly(
    layers: Sequence[Tensor], turn: Turn, pairing: Pairing, outs: Sequence[Tensor]
) -> None:
    """Rotate tensors of any kind, block by block; compiled code is compared with this."""
    scratch = _Scratch()
    for start in range(0, turn.cos.shape[0], BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        cos, sin = turn.cos[block], turn.sin[block]
        for keys, out in zip(layers, outs, strict=True):
            source, target = keys[:, block], out[:, block]
            rotated = scratch.like("rotated", source)
            if source.dtype != torch.float32:
                source = scratch.like("source", source).copy_(source)
            partners = _partners(source, pairing, scratch.like("partners", source))
            torch.mul(source, cos, out=rotated)
            if target.dtype == torch.float32:
                torch.addcmul(rotated, partners, sin, out=target)
            else:
                target.copy_(rotated.addcmul_(partners, sin))


def _partners(keys: Tensor, pairing: Pairing, out: Tensor) -> Tensor:
    """Write the other dimension of each pair to every dimension's place."""
    if pairing == "half":
        half = keys.shape[-1] // 2
        return torch.cat([keys[..., half:], keys[..., :half]], -1, out=out)
    out[..., 0::2] = keys[..., 1::2]
    out[..., 1::2] = keys[..., 0::2]
    return out
