"""Moving post-RoPE keys between positions.

Owns the rotation; knows nothing of caches or models beyond a function that returns a
model's own cosines and sines. Values carry no position and are never moved.

The rotation that takes a key from position p to q is the ratio of the model's own tables
at q and p. Taking the ratio, and scaling it to unit modulus, cancels YaRN's attention
scaling and reproduces the model's own float32 angle rounding, so a moved key equals the
key the model would have computed to 1e-7 at every distance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes.spec import RopeSpec

RotaryTable = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [tokens] to float32 cosines and sines [tokens, rotary_dim/2], as the model has them."""

BLOCK_TOKENS = 256
"""Tokens rotated at a time: the block and its temporaries stay in the second-level cache."""

MAX_CACHED_TURNS = 4
"""Rotations kept: one per segment in use; each is 2 x tokens x rotary_dim/2 floats."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Rotation of a stretch of keys, unit modulus.

    Args:
        cos: Cosines of the angles, float32 [tokens, rotary_dim/2].
        sin: Sines.
    """

    cos: Float[Tensor, "tokens pairs"]
    sin: Float[Tensor, "tokens pairs"]


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding: its spec and its own tables."""

    spec: RopeSpec
    table: RotaryTable
    _turns: OrderedDict[tuple[int, int, int], Turn] = field(default_factory=OrderedDict, repr=False)

    def turn(self, source: Int[Tensor, " tokens"], target: Int[Tensor, " tokens"]) -> Turn:
        """Return the rotation from positions `source` to `target`, computed in float64."""
        ratio = self._unit(target) * self._unit(source).conj()
        ratio = ratio / ratio.abs()
        return Turn(ratio.real.float().contiguous(), ratio.imag.float().contiguous())

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

    Values carry no position and are never moved.

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
    turn_keys(keys, rotary.turn(source, target), rotary.spec, out)
    return out


def turn_keys(
    keys: Float[Tensor, "kv_heads tokens head_dim"],
    turn: Turn,
    spec: RopeSpec,
    out: Float[Tensor, "kv_heads tokens head_dim"],
) -> None:
    """Rotate keys into `out` in one pass over them; `out` may not overlap `keys`."""
    half = spec.rotary_dim // 2
    for start in range(0, keys.shape[1], BLOCK_TOKENS):
        block = slice(start, min(start + BLOCK_TOKENS, keys.shape[1]))
        cos, sin = turn.cos[block], turn.sin[block]
        source, target = keys[:, block], out[:, block]
        if spec.rotary_dim < keys.shape[2]:
            target[..., spec.rotary_dim :] = source[..., spec.rotary_dim :]
        if spec.pairing == "half":
            first, second = source[..., :half], source[..., half : spec.rotary_dim]
            to_first, to_second = target[..., :half], target[..., half : spec.rotary_dim]
        else:
            first, second = source[..., : spec.rotary_dim : 2], source[..., 1 : spec.rotary_dim : 2]
            to_first, to_second = (
                target[..., : spec.rotary_dim : 2],
                target[..., 1 : spec.rotary_dim : 2],
            )
        if keys.dtype == torch.float32:
            torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
            torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        else:
            first, second = first.float(), second.float()
            to_first.copy_((first * cos).addcmul_(second, sin, value=-1))
            to_second.copy_((second * cos).addcmul_(first, sin))
