"""The plan of one request: what is loaded, what is computed, and when to load.

A plan is the same `Plan` as everywhere: views of compiled segments and computed tokens. Which of
it is due follows from how many tokens are computed alone, so preempted requests need no memory
of where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from kvnotes.plan import Compute, Plan, Reuse, Step, plan_compose
from kvnotes.vllm.index import Found


@dataclass(frozen=True, slots=True)
class Load:
    """A stretch of a segment that is put into vLLM's cache.

    Args:
        key: The segment.
        source_start: First token of the segment.
        target_start: Where it goes in the prompt.
        num_tokens: How many tokens.
        shift: How far their keys move.
        names: Names of the blocks that hold them, whole ones; none where they are of a segment.
        block_size: Tokens of these blocks.
    """

    key: str
    source_start: int
    target_start: int
    num_tokens: int
    shift: int
    names: tuple[bytes, ...] = ()
    block_size: int = 1

    @property
    def target_stop(self) -> int:
        """Position after its last token."""
        return self.target_start + self.num_tokens

    def rest(self, position: int) -> Load:
        """Return the part from a position of the prompt on."""
        done = position - self.target_start
        return replace(
            self,
            source_start=self.source_start + done,
            target_start=position,
            num_tokens=self.num_tokens - done,
            names=self.names[done // self.block_size :],
        )


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """How a prompt is made.

    Args:
        plan: The steps.
        loads: Its views of segments, in order.
        titles: Names of the segments, for people.
        num_seam_tokens: Tokens of these segments that are computed.
        fingerprint: The model.
    """

    plan: Plan
    loads: tuple[Load, ...]
    titles: tuple[str, ...]
    num_seam_tokens: int
    fingerprint: str

    @property
    def digest(self) -> str:
        """Key of the K/V that the plan makes."""
        return self.plan.digest(self.fingerprint)

    def salts(self, block_size: int) -> dict[int, bytes]:
        """Return what has to enter the hashes of vLLM's blocks, by block.

        From the block on in which a load begins, K/V are not what a plain request computes. What
        is loaded, and where, says what they are; prompts that go on otherwise share them.
        """
        found: dict[int, bytes] = {}
        for load in self.loads:
            block = load.target_start // block_size
            said = f"{self.fingerprint}:{load.key}:{load.source_start}:{load.num_tokens}"
            found[block] = found.get(block, b"kvnotes ") + f"{said}@{load.target_start};".encode()
        return {block: sha256(said).digest() for block, said in found.items()}

    @property
    def keys(self) -> tuple[str, ...]:
        """The segments it needs."""
        return self.keys_behind(0)

    def keys_behind(self, num_computed: int) -> tuple[str, ...]:
        """Return the segments that are needed behind so many computed tokens."""
        behind = (load for load in self.loads if load.target_stop > num_computed)
        return tuple(dict.fromkeys(load.key for load in behind if not load.names))

    @property
    def num_loaded(self) -> int:
        """How many tokens are loaded, if none of them are cached already."""
        return sum(load.num_tokens for load in self.loads)

    def due(self, num_computed: int) -> Load | None:
        """Return what is to be loaded next, if nothing has to be computed before it."""
        for load in self.loads:
            if num_computed < load.target_start:
                return None
            if num_computed < load.target_stop:
                return load.rest(num_computed)
        return None

    def limit(self, num_computed: int) -> int | None:
        """Return where computing has to stop for a load; None: nowhere."""
        starts = (load.target_start for load in self.loads if load.target_start > num_computed)
        return next(starts, None)


def plan_splices(
    token_ids: Sequence[int],
    found: Sequence[Found],
    fingerprint: str,
    *,
    num_seam_tokens: int,
    block_size: int | None = None,
) -> SplicePlan | None:
    """Return the plan of a prompt; None if nothing of it is loaded.

    Args:
        token_ids: The prompt.
        found: The segments that stand in it.
        fingerprint: The model.
        num_seam_tokens: Tokens recomputed at each splice.
        block_size: Only one load can be made, and it begins at a multiple of this: vLLM's own
            scheduler. What stands before it in the segment is computed.
    """
    splices = [item.splice for item in found[:1] if block_size] or [item.splice for item in found]
    plan = plan_compose(token_ids, splices, num_seam_tokens=num_seam_tokens)
    if block_size:
        plan = _rounded(plan, block_size)
    compiled = {item.compiled.run.digest: item.compiled for item in found}
    views = [step for step in plan.steps if isinstance(step, Reuse)]
    loads = tuple(
        Load(compiled[v.source_id].key, v.source_start, v.target_start, v.num_tokens, v.shift)
        for v in views
    )
    titles = tuple(compiled[view.source_id].title for view in views)
    num_seam = sum(len(view.run) - view.num_tokens for view in views)
    return SplicePlan(plan, loads, titles, num_seam, fingerprint) if loads else None


def _rounded(plan: Plan, block_size: int) -> Plan:
    """Return a plan whose first view begins at a block, and which has no other."""
    ids = plan.token_ids
    view = next((step for step in plan.steps if isinstance(step, Reuse)), None)
    if view is None:
        return plan
    start = -(-view.target_start // block_size) * block_size
    if start >= view.target_stop:
        return Plan.prefill(ids)
    steps: list[Step] = [Compute(0, ids[:start])] if start else []
    steps.append(view.clip(start, view.target_stop))
    steps.append(Compute(view.target_stop, ids[view.target_stop :]))
    return Plan(ids, tuple(steps), plan.strategy, plan.notes)
