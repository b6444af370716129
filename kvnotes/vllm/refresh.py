"""Refresh: a field changes in place, and what stood behind it is used again.

vLLM finds blocks by a hash of everything before them, so a changed field hides all blocks behind
it. They are still there, under their old names. A refreshed prompt computes the blocks of the
field, copies those behind them, and computes the rest: an erratum at its end, and the question.

    old      [ header ][ old value ][ ....... policy, turns ....... ]
    new      [ header ][ new value ][ ....... policy, turns ....... ][ erratum, question ]
               found     computed     copied, block by block           computed

Copies stay where they were, so nothing is rotated, and no layout has to be known. They hold notes
about the old value, so their names say what they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvnotes.errors import PlanError
from kvnotes.plan import Compute, Plan, Run, Step
from kvnotes.vllm.planning import Load, SplicePlan
from kvnotes.vllm.requests import RefreshWish
from kvnotes.vllm.salt import hashes_of

MAX_CHAINS = 65536
"""Blocks whose names are remembered: two sessions of a million tokens at 32 tokens a block."""

REFRESH = "refresh"


class Chains:
    """The names that blocks have, where these are not the plain ones."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, bytes] = OrderedDict()

    def keep(self, plain: Sequence[bytes], actual: Sequence[bytes]) -> None:
        """Remember the names of a prompt's blocks beside their plain ones."""
        for name, found in zip(plain, actual, strict=False):
            if name != found:
                self._names[name] = found
                self._names.move_to_end(name)
        while len(self._names) > MAX_CHAINS:
            self._names.popitem(last=False)

    def actual(self, plain: bytes) -> bytes:
        """Return the name that a block with this plain name has."""
        return self._names.get(plain, plain)


@dataclass(frozen=True, slots=True)
class Refresher:
    """Makes plans that copy blocks.

    Args:
        fingerprint: The model.
        block_size: Tokens of a block, and of a hash.
        is_cached: Whether a block of this name is in vLLM's cache.
    """

    fingerprint: str
    block_size: int
    is_cached: Callable[[bytes], bool]

    def plan(self, request: Any, wish: RefreshWish, chains: Chains) -> SplicePlan:
        """Return the plan of a prompt whose field was changed.

        Raises:
            PlanError: There is nothing to copy; its message is the reason that a reply names.
        """
        ids, size = tuple(request.prompt_token_ids), self.block_size
        stop = wish.start + len(wish.token_ids)
        if stop > len(ids):
            raise PlanError("refresh_outside_prompt", hint="start and token_ids lie inside it")
        old = (*ids[: wish.start], *wish.token_ids, *ids[stop:])
        names = [chains.actual(name) for name in hashes_of(request, old)]
        first = -(-stop // size)
        last = first
        while last < len(names) and last * size + size < len(ids) and self.is_cached(names[last]):
            last += 1
        if last == first:
            raise PlanError("refresh_not_cached", hint="compute it")
        held = tuple(names[first:last])
        digest = sha256(b"".join(held)).hexdigest()
        load = Load(f"{REFRESH}:{digest}", 0, first * size, (last - first) * size, 0, held, size)
        whole = Run(old[: load.target_stop], altered=f"blocks:{digest}")
        view = whole.cut(load.target_start, load.target_stop).whole()
        steps: list[Step] = [
            Compute(0, ids[: load.target_start]),
            view,
            Compute(load.target_stop, ids[load.target_stop :]),
        ]
        plan = Plan(ids, tuple(steps), REFRESH)
        return SplicePlan(plan, (load,), (REFRESH,), 0, self.fingerprint)
