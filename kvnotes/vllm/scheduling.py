"""The half of the plug-in in vLLM's scheduler: what is spliced, and when.

new request      find segments, make the plan, name its blocks after it
first lookup     segments are opened by the workers; until then the request waits
each step        what is due is loaded before the forward pass
any failure      the request is computed, and the reason counted
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvnotes.errors import KVNotesError
from kvnotes.store.header import content_key
from kvnotes.vllm.config import ConnectorConfig
from kvnotes.vllm.index import SegmentIndex
from kvnotes.vllm.messages import Capture, Injection, StepMeta, WorkerNews
from kvnotes.vllm.metrics import SpliceStats
from kvnotes.vllm.planning import Load, SplicePlan, plan_splices
from kvnotes.vllm.requests import KEY, Wish, compiled_run
from kvnotes.vllm.salt import salt_request, unsalt_request
from kvnotes.vllm.served import ServedModel

logger = logging.getLogger(__name__)

MAX_OPEN = 512
"""Segments that workers keep open: a mapped file each."""


@dataclass
class _Tracked:
    """What is known about one request.

    Args:
        request: The request.
        wish: What it asks for.
        plan: How it is made; None where it is computed.
        reason: Why it is computed, "" where that is not the question.
        waits_until: Deadline of its segments, once they are asked for.
        due: What the next step has to load for it.
        num_loaded: Tokens loaded so far.
    """

    request: Any
    wish: Wish
    plan: SplicePlan | None = None
    reason: str = ""
    waits_until: float | None = None
    due: list[Load] = field(default_factory=list)
    num_loaded: int = 0


class SchedulerSide:
    """Plans splices for vLLM's scheduler.

    Args:
        served: The model.
        config: How the plug-in is set up.
        num_workers: Workers that hold a share of the K/V each.
        jumps: Whether the scheduler can load in the middle of a prompt.
    """

    def __init__(
        self, served: ServedModel, config: ConnectorConfig, *, num_workers: int, jumps: bool
    ) -> None:
        self.stats = SpliceStats()
        self._served = served
        self._config = config
        self._num_workers = num_workers
        self._jumps = jumps
        store = config.open_store()
        fingerprint = served.identity.fingerprint
        self._index = SegmentIndex(store, fingerprint, min_tokens=config.min_tokens)
        self._index.refresh(now=True)
        self._tracked: dict[str, _Tracked] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._opening: dict[str, int] = {}
        self._to_open: dict[str, None] = {}
        self._ended: list[str] = []
        self.block_size = 0
        self.hash_block_size = 0
        self._manager: Any = None
        logger.info("kvnotes: %d segments for this model in %s", len(self._index), config.store)

    def bind(self, manager: Any, block_size: int) -> None:
        """Take vLLM's cache manager, once it is there."""
        self._manager = manager
        self.block_size = block_size
        self.hash_block_size = manager.block_pool.hash_block_size

    # -- a request's way ---------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Plan a request before vLLM looks for anything of it."""
        if not request.kv_transfer_params and not len(self._index):
            self._index.refresh()
            if not len(self._index):
                return
        try:
            wish = Wish.of(request.kv_transfer_params)
        except KVNotesError as error:
            self._track(request, Wish(splice=False), reason="invalid_request", said=error)
            return
        tracked = self._track(request, wish)
        if wish.compile is not None:
            self._begin_compile(tracked)
        elif wish.splice:
            self._begin_splice(tracked)

    def _track(
        self, request: Any, wish: Wish, *, reason: str = "", said: object = None
    ) -> _Tracked:
        tracked = _Tracked(request, wish)
        self._tracked[request.request_id] = tracked
        if reason:
            self._refuse(tracked, reason, said)
        return tracked

    def _begin_compile(self, tracked: _Tracked) -> None:
        wish, request = tracked.wish.compile, tracked.request
        assert wish is not None
        reason = ""
        if not self._config.allow_compile:
            reason = "compile_not_allowed"
        elif self._num_workers > 1:
            reason = "compile_needs_one_worker"
        elif self._config.store is None:
            reason = "no_store"
        elif wish.preamble_tokens >= request.num_prompt_tokens or not _plain(request):
            reason = "nothing_to_compile"
        if reason:
            tracked.wish = Wish(splice=False)
            self._refuse(tracked, reason, None)
        else:  # every token is computed, behind nothing but the declared preamble
            request.skip_reading_prefix_cache = True

    def _begin_splice(self, tracked: _Tracked) -> None:
        request, wish = tracked.request, tracked.wish
        if not _plain(request):
            return
        self._index.refresh()
        found = self._index.find(request.prompt_token_ids, wish)
        if not found:
            if wish.segments or wish.values:
                self._refuse(tracked, "no_segment", None)
            return
        seam = wish.num_seam_tokens
        plan = plan_splices(
            request.prompt_token_ids,
            found,
            self._served.identity.fingerprint,
            num_seam_tokens=self._config.num_seam_tokens if seam is None else seam,
            block_size=None if self._jumps else self.block_size,
        )
        if plan is None:
            return self._refuse(tracked, "too_short", None)
        if request.skip_reading_prefix_cache:
            return self._refuse(tracked, "prompt_logprobs", None)
        tracked.plan = plan
        salt_request(request, plan.salts(self.hash_block_size), self.hash_block_size)

    def give_up(self, request: Any, reason: str) -> None:
        """Have a request computed that no step has seen yet."""
        unsalt_request(request)
        self._track(request, Wish(splice=False), reason=reason)

    def num_matched(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens can be loaded behind those that are computed; None: not yet."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.plan is None:
            return 0
        tracked.due.clear()  # of a time before it was preempted
        plan = tracked.plan
        if not self._jumps and num_computed < plan.loads[0].target_start:
            self._refuse(tracked, "prefix_not_cached", None)
        elif not self._opened(tracked, plan.keys_behind(num_computed)):
            return None
        if tracked.plan is None:
            # vLLM has just looked for the blocks of the plan: it has to look for plain ones
            return None
        load = self.due(request, num_computed)
        return 0 if load is None else load.num_tokens

    def due(self, request: Any, num_computed: int) -> Load | None:
        """Return what is to be loaded behind so many tokens, at least one left to compute."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.plan is None:
            return None
        load = tracked.plan.due(num_computed)
        return load if load is None or load.target_stop < request.num_tokens else None

    def limit(self, request: Any, num_computed: int) -> int | None:
        """Return where computing has to stop for the next load; None: nowhere."""
        tracked = self._tracked.get(request.request_id)
        if not self._jumps or tracked is None or tracked.plan is None:
            return None
        return tracked.plan.limit(num_computed)

    def has_plan(self, request: Any) -> bool:
        """Whether a request is made of segments."""
        tracked = self._tracked.get(request.request_id)
        return tracked is not None and tracked.plan is not None

    def loads_now(self, request: Any, load: Load) -> None:
        """Say that the step in which this request is scheduled next loads this first."""
        self._tracked[request.request_id].due.append(load)

    def allocated(self, request: Any, num_external: int) -> None:
        """Take note that vLLM has made room for what `num_matched` promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.plan is None:
            return
        if num_external:
            computed = self._num_local(request, tracked.plan, num_external)
            load = self.due(request, computed)
            assert load is not None and load.num_tokens == num_external
            tracked.due.append(load)

    @staticmethod
    def _num_local(request: Any, plan: SplicePlan, num_external: int) -> int:
        """Return how many tokens are computed before a load of so many."""
        for load in plan.loads:
            start = load.target_stop - num_external
            if load.target_start <= start < load.target_stop:
                return start
        raise AssertionError(
            f"no load of {num_external} tokens in the plan of {request.request_id}"
        )

    # -- segments that workers open ----------------------------------------------------------

    def _opened(self, tracked: _Tracked, keys: Sequence[str]) -> bool:
        """Whether nothing has to be waited for: segments are open, or the plan is given up."""
        missing = [key for key in keys if key not in self._ready]
        if not missing:
            for key in keys:
                self._ready.move_to_end(key)
            return True
        now = time.monotonic()
        if tracked.waits_until is None:
            tracked.waits_until = now + self._config.deadline_seconds
            self.stats.count("deferrals")
        elif now > tracked.waits_until:
            self._refuse(tracked, "deadline", None)
            return True
        for key in missing:
            if key not in self._opening:
                self._opening[key] = self._num_workers
                self._to_open[key] = None
        return False

    def update(self, news: WorkerNews) -> None:
        """Take in what the workers have said."""
        for key, number in news.opened.items():
            left = self._opening.get(key, 0) - number
            if key in self._opening and left <= 0:
                del self._opening[key]
                self._ready[key] = None
                self.stats.count("opened")
            elif key in self._opening:
                self._opening[key] = left
        for key, said in news.failed.items():
            self._opening.pop(key, None)
            self._ready.pop(key, None)
            self._index.forget(key)
            self.stats.count("failed", reason="open")
            logger.warning("kvnotes: segment %s cannot be opened: %s", key[:12], said)
            for tracked in self._with(key):
                if not tracked.num_loaded:  # else it is open for that one
                    self._refuse(tracked, "segment_unavailable", said)
        for request_id, said in news.lost.items():
            self.stats.count("failed", reason="load")
            logger.warning("kvnotes: K/V of request %s were not loaded: %s", request_id, said)
            if request_id in self._tracked:
                self._take_back(self._tracked[request_id], said)
        for request_id, said in news.compiled.items():
            if said:
                self.stats.count("failed", reason="compile")
                logger.warning("kvnotes: request %s made no segment: %s", request_id, said)
            else:
                self.stats.count("compiled")
                self._index.refresh(now=True)

    def _with(self, key: str) -> Iterable[_Tracked]:
        tracked = self._tracked.values()
        return [t for t in tracked if t.plan is not None and key in t.plan.keys]

    def _take_back(self, tracked: _Tracked, said: str) -> None:
        """Have a request computed whose load failed: vLLM computes from before the load on.

        Its blocks have the plan's names already, and will hold something else.
        """
        if not self._jumps and tracked.plan is not None:  # else the scheduler has freed them
            (blocks,) = self._manager.get_block_ids(tracked.request.request_id)
            first = tracked.plan.loads[0].target_start // self.block_size
            self._manager.evict_blocks(set(blocks[first:]))
        tracked.num_loaded = 0
        self._refuse(tracked, "load_failed", said)

    def _refuse(self, tracked: _Tracked, reason: str, said: object) -> None:
        """Have a request computed, and say why."""
        tracked.reason = reason
        self.stats.count("refused", reason=reason)
        if said is not None:
            logger.warning("kvnotes: request %s: %s: %s", tracked.request.request_id, reason, said)
        if tracked.plan is not None:
            tracked.plan = None
            tracked.due.clear()
            if not tracked.num_loaded:
                unsalt_request(tracked.request)

    # -- each step ---------------------------------------------------------------------------

    def step(self, output: Any) -> StepMeta:
        """Return what the workers have to do in this step."""
        injections, captures = [], []
        for request_id, number in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.wish.compile is not None:
                captures += self._capture(tracked, number)
            for load in tracked.due:
                blocks = self._manager.get_block_ids(request_id)
                injections.append(Injection(request_id, load, blocks))
                self._count(tracked, load)
            tracked.due.clear()
        opening, ended = tuple(self._to_open), tuple(self._ended)
        self._to_open.clear()
        self._ended.clear()
        return StepMeta(opening, self._superfluous(), tuple(injections), tuple(captures), ended)

    def _count(self, tracked: _Tracked, load: Load) -> None:
        if not tracked.num_loaded:
            self.stats.count("plans")
        tracked.num_loaded += load.num_tokens
        self.stats.count("loads")
        self.stats.count("loaded_tokens", load.num_tokens)

    def _capture(self, tracked: _Tracked, num_scheduled: int) -> list[Capture]:
        request, wish = tracked.request, tracked.wish.compile
        start = request.num_computed_tokens
        number = min(num_scheduled, request.num_prompt_tokens - start)
        if wish is None or number <= 0:
            return []
        ids, blocks = (
            tuple(request.prompt_token_ids),
            self._manager.get_block_ids(request.request_id),
        )
        return [Capture(request.request_id, start, number, ids, wish, blocks)]

    def _superfluous(self) -> tuple[str, ...]:
        """Return the segments, used least recently, that are open beyond the limit."""
        wanted = {key for t in self._tracked.values() if t.plan for key in t.plan.keys}
        over = len(self._ready) - MAX_OPEN
        closed = [key for key in self._ready if key not in wanted][: max(0, over)]
        for key in closed:
            del self._ready[key]
        return tuple(closed)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; return what its reply says about the splice."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.wish.compile is not None:
            self._ended.append(request.request_id)
            return {KEY: {"segment": self._key_of(tracked)}}
        if tracked.plan is None and not tracked.reason:
            return None
        return {KEY: _said(tracked)}

    def _key_of(self, tracked: _Tracked) -> str:
        """Return the key that a compiled prompt has in the store."""
        wish = tracked.wish.compile
        assert wish is not None
        run = compiled_run(tracked.request.prompt_token_ids, wish)
        return content_key(
            "segment", self._config.tenant, self._served.identity.fingerprint, run.digest
        )


def _said(tracked: _Tracked) -> dict[str, Any]:
    """Return what a reply says about its splice."""
    plan = tracked.plan
    if plan is None:
        return {"strategy": "reprefill", "fallback_reason": tracked.reason}
    counts = plan.plan.tokens
    return {
        "strategy": plan.plan.strategy,
        "shape": plan.plan.shape,
        "digest": plan.digest,
        "exact": plan.plan.exact,
        "segments": list(plan.titles),
        "spliced_tokens": counts.total - counts.computed,
        "computed_tokens": counts.computed,
        "loaded_tokens": tracked.num_loaded,
        "fallback_reason": tracked.reason,
    }


def _plain(request: Any) -> bool:
    """Whether a prompt is text alone, computed by the model alone."""
    return bool(
        request.prompt_token_ids
        and request.prompt_embeds is None
        and not request.mm_features
        and request.lora_request is None
        and request.sampling_params is not None
    )
