"""Who sees whom: the model's own masks, at our positions.

transformers makes masks from the order of a cache, which is right only for tokens that are
appended. Models ask one function for every mask, whatever their layers see of earlier tokens
(all, a window, a chunk); here that function answers from the positions of a pass. Outside of
a pass of ours it answers as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from kvnotes.engine.blocks import Reads
from kvnotes.errors import EngineError

PACKED_NAME = "kvnotes_packed"
"""Our attention, as transformers knows it."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """What the tokens of one pass may see.

    Args:
        queries: Position of each new token.
        keys: Position of each token that stands in the cache after them.
        allowed: What they may see at most, beside what the model's own mask hides; None: all.
        in_order: The new tokens are the first ones, in order, and there are no others.
        places: What the model is given as positions of the new tokens, where that differs: on
            three axes, if images stand among them.
        reads: What attention reads where it stands; None: the model hands over all keys.
    """

    queries: Int[Tensor, " queries"]
    keys: Int[Tensor, " keys"]
    allowed: Bool[Tensor, "queries keys"] | None = None
    in_order: bool = False
    places: Int[Tensor, "*axes queries"] | None = None
    reads: Reads | None = None

    @property
    def position_ids(self) -> Tensor:
        """What the model is given, with its batch of one."""
        places = self.queries if self.places is None else self.places
        return places[None] if places.dim() == 1 else places[:, None]

    def __post_init__(self) -> None:
        if self.allowed is None:
            return
        later = self.keys[None] > self.queries[:, None]
        if bool((self.allowed & later).any()):
            raise EngineError(
                "a token is to see another one at a later position",
                hint="no plan does that; give every token a position behind what it sees",
            )


def see_before(new: Tensor, stop: int, axes: Tensor | None) -> Visibility:
    """Return what new tokens of a prompt see: all slots before their own.

    Args:
        new: Their slots.
        stop: One past the last slot.
        axes: Positions of the whole prompt, where images stand in it.
    """
    places = None if axes is None else axes[:, new]
    return Visibility(new, torch.arange(stop), places=places)


_pass: ContextVar[Visibility | None] = ContextVar("visibility", default=None)


@contextmanager
def seeing(visibility: Visibility) -> Iterator[None]:
    """Have masks made from these positions, in this context."""
    token = _pass.set(visibility)
    try:
        yield
    finally:
        _pass.reset(token)


def current_reads() -> Reads | None:
    """Return what attention reads in the pass that runs; None where keys are handed over."""
    visibility = _pass.get()
    return None if visibility is None else visibility.reads


def _masks(own: Callable[..., Any], *, may_skip: bool) -> Callable[..., Any]:
    """Return a mask function for one attention implementation.

    Args:
        own: What transformers does.
        may_skip: The attention takes no mask at all for tokens in order.
    """

    def mask(*args: Any, **kwargs: Any) -> Any:
        visibility = _pass.get()
        if visibility is None:
            return own(*args, **kwargs)
        if visibility.reads is not None:
            return _token(visibility.reads, *args, **kwargs)
        return _mask(visibility, *args, may_skip=may_skip, **kwargs)

    return mask


def _token(
    reads: Reads,
    batch_size: int,
    q_length: int,
    *_: Any,
    mask_function: Callable[..., Any] = causal_mask_function,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    **__: Any,
) -> Tensor:
    """Return what stands for a mask in a pass that reads keys where they are."""
    if q_length != len(reads.queries) or use_vmap:
        raise EngineError(
            f"the model asks for a mask of {q_length} tokens, this pass has {len(reads.queries)}",
            hint="the model's attention is not supported",
        )
    return reads.mask(mask_function, dtype)


def _mask(
    visibility: Visibility,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    may_skip: bool,
    dtype: torch.dtype = torch.float32,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Return an additive mask `[1, 1, queries, keys]`; None where a causal kernel does the same.

    The batch is one, offsets are what the cache would say, and padding there is none.
    """
    queries, keys = visibility.queries, visibility.keys
    if (q_length, kv_length) != (len(queries), len(keys)) or use_vmap:
        raise EngineError(
            f"the model asks for a mask of {q_length} x {kv_length} tokens, this pass has "
            f"{len(queries)} x {len(keys)}",
            hint="the model's attention is not supported",
        )
    fits = local_size is None or kv_length <= local_size
    if may_skip and allow_is_causal_skip and visibility.in_order and fits:
        return None
    zero = torch.zeros(1, dtype=torch.long)
    places = zero[:, None, None, None], zero[None, :, None, None], queries[None, None, :, None]
    seen = mask_function(*places, keys[None, None, None, :])
    seen = seen.expand(batch_size, 1, q_length, kv_length)
    if visibility.allowed is not None:
        seen = seen & visibility.allowed
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


AttentionMaskInterface.register("sdpa", _masks(sdpa_mask, may_skip=True))
AttentionMaskInterface.register("eager", _masks(eager_mask, may_skip=False))
AttentionMaskInterface.register(PACKED_NAME, _masks(sdpa_mask, may_skip=True))
