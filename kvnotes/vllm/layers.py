"""vLLM's attention layers beside those of the model's spec.

Owns which layer is which, which heads a tensor-parallel worker holds, and the checks that vLLM
rotates as the tables say. Only shapes and names; nothing here imports vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvnotes.errors import UnsupportedModelError
from kvnotes.rope import Rotary
from kvnotes.spec import ModelSpec

TABLE_TOLERANCE = {"float32": 2e-3, "float16": 4e-3, "bfloat16": 1.6e-2}
"""Largest difference of vLLM's cosines and sines from ours. Its tables have the model's dtype, and
round angles in another order: 2^-23 of a position of 16,000 is 2e-3."""

NUM_TABLE_ROWS = 64
"""Positions at which tables are compared, spread over all."""


@dataclass(frozen=True, slots=True)
class ServedLayer:
    """One attention layer of a worker.

    Args:
        name: vLLM's name of it.
        index: Its place in the spec.
        group: Its group of blocks.
        block_size: Tokens for each block of that group.
        heads: Which K/V heads this worker holds.
    """

    name: str
    index: int
    group: int
    block_size: int
    heads: slice


def order_of(names: Iterable[str]) -> list[str]:
    """Return names of layers in the order of their numbers.

    Raises:
        UnsupportedModelError: A name has no number, or two have the same.
    """
    numbered: dict[int, str] = {}
    for name in names:
        found = re.search(r"\.layers?\.(\d+)\.|\.h\.(\d+)\.", name)
        if found is None:
            raise _refused(f"the layer {name!r} has no number")
        number = int(found.group(1) or found.group(2))
        if number in numbered:
            raise _refused(f"the layers {numbered[number]!r} and {name!r} have one number")
        numbered[number] = name
    return [numbered[number] for number in sorted(numbered)]


def heads_of(rank: int, num_workers: int, num_heads: int, num_local: int) -> slice:
    """Return which of a layer's K/V heads a worker holds.

    With more workers than heads, several hold the same one.

    Args:
        rank: The worker.
        num_workers: How many there are.
        num_heads: Heads of the layer.
        num_local: Heads that this worker has.

    Raises:
        UnsupportedModelError: The heads are not shared out evenly.
    """
    if num_local * num_workers == num_heads:
        first = rank * num_local
    elif num_local == 1 and num_workers % num_heads == 0:
        first = rank // (num_workers // num_heads)
    else:
        raise _refused(
            f"worker {rank} of {num_workers} has {num_local} of {num_heads} heads of keys"
        )
    return slice(first, first + num_local)


def check_spec(spec: ModelSpec, num_layers: int, dtype: str) -> None:
    """Refuse a model whose K/V vLLM does not keep token by token, head by head.

    Raises:
        UnsupportedModelError: Names the reason.
    """
    kinds = {layer.kind for layer in spec.layers}
    if "latent" in kinds or "index" in spec.tensor_names:
        raise _refused("its layers keep a latent vector or an indexer, which vLLM stores otherwise")
    if "chunked" in kinds:
        raise _refused("it attends in chunks, where segments may only move by whole ones")
    if num_layers != spec.num_layers:
        raise _refused(f"vLLM keeps {num_layers} layers of K/V, the model has {spec.num_layers}")
    if dtype != spec.dtype:
        raise _refused(f"vLLM runs it in {dtype}, it was prepared in {spec.dtype}")


def check_shapes(spec: ModelSpec, index: int, head_dim: int) -> None:
    """Refuse a layer of another shape.

    Raises:
        UnsupportedModelError: Names both.
    """
    layer = spec.layers[index]
    if (layer.head_dim, layer.value_dim or layer.head_dim) != (head_dim, head_dim):
        raise _refused(
            f"layer {index} has keys of {head_dim} dimensions in vLLM, {layer.head_dim} in the spec"
        )


def check_tables(rotaries: Sequence[Rotary], model: Any, dtype: str) -> None:
    """Refuse a model that vLLM rotates otherwise than its tables say.

    Every rotary table that vLLM holds has to be one of ours, and each of ours has to be held.

    Raises:
        UnsupportedModelError: Names the table.
    """
    held: dict[int, Tensor] = {}
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, Tensor) and table.dim() == 2:
            held[id(table)] = table
    for index, rotary in enumerate(rotaries):
        found = [table for table in held.values() if _gap(rotary, table) <= TABLE_TOLERANCE[dtype]]
        if not found:
            gaps = ", ".join(f"{_gap(rotary, table):.0e}" for table in held.values()) or "none"
            raise _refused(
                f"no rotary table of vLLM is the model's number {index}; they differ by {gaps}"
            )


def _gap(rotary: Rotary, table: Tensor) -> float:
    """Return the largest difference of a table from vLLM's, `[positions, 2 x pairs]`."""
    pairs = rotary.spec.rotary_dim // 2
    if table.shape[1] != 2 * pairs:
        return float("inf")
    size = min(table.shape[0], len(getattr(rotary.table, "cos", table)))
    rows = torch.linspace(0, size - 1, NUM_TABLE_ROWS).long()
    cos, sin = rotary.table(rows)
    theirs = table[rows.to(table.device)].float().cpu()
    ours = torch.cat([cos, -sin if rotary.spec.reversed else sin], -1)
    return float((ours - theirs).abs().max())


def slots_of(
    blocks: Sequence[int], block_size: int, start: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the slots of some tokens of a request, and which of them there are.

    Block 0 is no block: what it would hold lies outside of a window.

    Args:
        blocks: The blocks of the request.
        block_size: Tokens for each block.
        start: Position of the first token.
        num_tokens: How many tokens.

    Returns:
        Slots `[kept]`, and the offsets of these tokens `[kept]`.
    """
    offsets = torch.arange(num_tokens)
    positions = offsets + start
    ids = torch.tensor(blocks, dtype=torch.long)[positions // block_size]
    kept = ids != 0
    slots = ids * block_size + positions % block_size
    return slots[kept], offsets[kept]


def by_name(groups: Iterable[Any]) -> Mapping[str, tuple[int, int]]:
    """Return for each layer its group of blocks, and the tokens of a block there."""
    return {
        name: (index, int(group.kv_cache_spec.block_size))
        for index, group in enumerate(groups)
        for name in group.layer_names
    }


def _refused(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"segments cannot be spliced into vLLM here: {reason}",
        hint="serve the model without the plug-in; errata work on any server",
    )
