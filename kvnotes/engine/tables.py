"""The cosines and sines that a model itself uses, found by watching it.

Every module that looks like a rotary embedding is watched during one pass; what it returned
then, it is asked for at other positions. No form of output is known by the model's name:
whole or half tables, pairs in either order, complex numbers, and old-style buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvnotes.rope import RotaryTable

Columns = Callable[[Tensor], Tensor]
"""Picks one column for each pair from a table `[tokens, width]`."""

FACTOR_DIGITS = 6
"""Digits of the factor on cosines and sines that count: it is measured on float32 tables."""

FREQUENCY_BITS = 12
"""Bits of an angle that count where no buffer holds the frequency: far from what another sine
library changes."""


@dataclass(frozen=True)
class Candidate:
    """A table that may be the one that keys were rotated with.

    Args:
        table: Cosines and sines by position, one column for each pair.
        rotary_dim: Twice the number of pairs.
        kind: The scaling as the configuration names it.
        digest: SHA-256 of the frequencies.
        factor: What cosines and sines are multiplied by.
    """

    table: RotaryTable = field(repr=False)
    rotary_dim: int
    kind: str
    digest: str
    factor: float


@dataclass(frozen=True)
class _Call:
    """One call of a module that looks like a rotary embedding."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_tokens: int

    @property
    def layer_type(self) -> str:
        """The type of layer that the table is for, where it was said."""
        texts = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, str)]
        return texts[0] if texts else ""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return raw cosines and sines `[tokens, width]`; None if that is not what comes."""
        # the first position shows which is which: no angle has a sine there
        asked = torch.nn.functional.pad(positions, (1, 0))

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return torch.zeros(1, dtype=torch.float32)
            if value.shape[-1:] == (self.num_tokens,):
                axes = asked if asked.dim() == 1 else asked.unsqueeze(1)
                return axes.expand(*value.shape[:-1], asked.shape[-1])
            return value

        with torch.inference_mode():
            found = self.module(
                *map(changed, self.args), **{k: changed(v) for k, v in self.kwargs.items()}
            )
        pair = _pair(found, asked.shape[-1])
        if pair is None:
            return None
        cos, sin = pair if not pair[1][0].any() else (pair[1], pair[0])
        return None if sin[0].any() else (cos[1:], sin[1:])


def candidates(model: Any, run: Callable[[], Any], num_tokens: int) -> list[Candidate]:
    """Return every table that a model may rotate with.

    Args:
        model: A transformers model.
        run: One pass over `num_tokens` tokens.
        num_tokens: Tokens of that pass.
    """
    calls = _watched(model, run, num_tokens)
    found: list[Candidate] = []
    for call in calls:
        found += _of_call(model, call)
    found += _of_buffers(model)
    return found


def _watched(model: Any, run: Callable[[], Any], num_tokens: int) -> list[_Call]:
    calls: dict[tuple[int, str], _Call] = {}

    def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        call = _Call(module, args, kwargs, num_tokens)
        calls.setdefault((id(module), call.layer_type), call)

    hooks = [
        module.register_forward_hook(record, with_kwargs=True)
        for module in model.modules()
        if _is_rotary(module)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values())


def _is_rotary(module: Any) -> bool:
    name = type(module).__name__.lower()
    held = dict(module.named_buffers(recurse=False))
    return "rotary" in name or "rope" in name or any(x.endswith("inv_freq") for x in held)


def _of_call(model: Any, call: _Call) -> Iterator[Candidate]:
    """Yield the readings of what one module returns."""
    try:
        raw = call(torch.arange(3))
    except Exception:  # a module that is no rotary embedding may say anything
        return
    if raw is None:
        return
    kind = _kind(model, call.layer_type)
    seen: list[tuple[Tensor, Tensor]] = []
    for columns in _readings(raw[0].shape[-1]):
        first = tuple(columns(part) for part in raw)
        if any(_same(first, other) for other in seen):
            continue
        seen.append((first[0], first[1]))

        def table(positions: Tensor, columns: Columns = columns) -> tuple[Tensor, Tensor]:
            found = call(positions)
            assert found is not None  # it was a table a moment ago
            cos, sin = found
            return columns(cos).clone(), columns(sin).clone()

        yield _candidate(table, kind, _frequencies(call), _factor(call))


def _of_buffers(model: Any) -> Iterator[Candidate]:
    """Yield tables that modules hold as one tensor of sines and cosines by position."""
    for module in model.modules():
        held = getattr(module, "embed_positions", None)
        if not isinstance(held, Tensor) or held.dim() != 2 or held.shape[1] % 2:
            continue
        sines, cosines = held.detach().float().chunk(2, -1)
        if not torch.allclose(sines**2 + cosines**2, torch.ones(()), atol=1e-4):
            continue

        def table(
            positions: Tensor, cosines: Tensor = cosines, sines: Tensor = sines
        ) -> tuple[Tensor, Tensor]:
            return cosines[positions], sines[positions]

        yield _candidate(table, "default", [], 1.0)
        return


def _readings(width: int) -> Iterator[Columns]:
    """Yield the ways to read one column for each pair from a table."""
    if width % 2 == 0:
        yield lambda table: table[..., : width // 2]  # both halves are the same
        yield lambda table: table[..., 0::2]  # neighbours are the same
    yield lambda table: table  # one column for each pair already


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _candidate(
    table: RotaryTable, kind: str, held: list[Tensor], factor: float | None
) -> Candidate:
    cos, sin = (part[0].double() for part in table(torch.ones(1, dtype=torch.long)))
    if factor is None:
        factor = round(float(torch.sqrt(cos**2 + sin**2).max()), FACTOR_DIGITS)
    return Candidate(table, 2 * len(cos), kind, _digest(torch.atan2(sin, cos), held), factor)


def _digest(angles: Tensor, held: list[Tensor]) -> str:
    """Return the digest of the frequencies: of the buffer that has them, else of the angles."""
    for frequencies in held:
        if frequencies.shape == angles.shape and torch.allclose(
            torch.remainder(frequencies.double() - angles + torch.pi, 2 * torch.pi),
            torch.full_like(angles, torch.pi),
            atol=1e-4,
        ):
            return hashlib.sha256(frequencies.numpy().tobytes()).hexdigest()
    rounded = torch.round(angles * 2.0**FREQUENCY_BITS).long()
    return hashlib.sha256(rounded.numpy().tobytes()).hexdigest()


def _frequencies(call: _Call) -> list[Tensor]:
    """Return the buffers of inverse frequencies that a module holds, its layer type's first."""
    held = [
        (name, buffer.detach().float())
        for name, buffer in call.module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.startswith("original")
    ]
    wanted = f"{call.layer_type}_inv_freq"
    return [buffer for _, buffer in sorted(held, key=lambda item: item[0] != wanted)]


def _factor(call: _Call) -> float | None:
    """Return what a module says it multiplies cosines and sines by, its layer type's first."""
    for name in (f"{call.layer_type}_attention_scaling", "attention_scaling"):
        value = getattr(call.module, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _kind(model: Any, layer_type: str) -> str:
    config = model.config.get_text_config(decoder=True)
    scaling = getattr(config, "rope_parameters", None) or {}
    own = scaling.get(layer_type, scaling) if layer_type else scaling
    return str(own.get("rope_type", "default")) if isinstance(own, dict) else "default"


def _pair(found: Any, num_tokens: int) -> tuple[Tensor, Tensor] | None:
    """Return two tables `[tokens, width]`, cosines and sines, from what a module returned."""
    if isinstance(found, Tensor) and found.is_complex():
        found = found.real, found.imag
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        return None
    cos, sin = found
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.shape != sin.shape:
        return None
    width = cos.shape[-1] if cos.dim() else 0
    if cos.dim() < 2 or cos.numel() != num_tokens * width:
        return None
    return cos.reshape(num_tokens, width).float(), sin.reshape(num_tokens, width).float()
