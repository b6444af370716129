"""The half of the plug-in in vLLM's scheduler: what is spliced, and when.

new request      find segments, make the plan, name its blocks after it
first lookup     segments are opened by the workers; until then the request waits
each step        what is due is loaded before the forward pass
any failure      the request is computed, and the reason counted
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvnotes.errors import KVNotesError, PlanError
from kvnotes.store.header import content_key
from kvnotes.vllm.config import ConnectorConfig
from kvnotes.vllm.index import SegmentIndex
from kvnotes.vllm.messages import Capture, Injection, StepMeta, WorkerNews
from kvnotes.vllm.metrics import SpliceStats
from kvnotes.vllm.opened import OpenSegments
from kvnotes.vllm.planning import Load, plan_splices
from kvnotes.vllm.refresh import Chains, Refresher
from kvnotes.vllm.requests import KEY, RefreshWish, Wish, compiled_run
from kvnotes.vllm.salt import hashes_of, salt_request, unsalt_request
from kvnotes.vllm.served import PreparedModel
from kvnotes.vllm.tracked import Tracked, is_plain

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Plans splices for vLLM's scheduler.

    Args:
        served: The model.
        config: How the plug-in is set up.
        num_workers: Workers that hold a share of the K/V each.
        jumps: Whether the scheduler can load in the middle of a prompt.
    """

    def __init__(
        self, served: PreparedModel, config: ConnectorConfig, *, num_workers: int, jumps: bool
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
        self._tracked: dict[str, Tracked] = {}
        self._open = OpenSegments(num_workers)
        self._ended: list[str] = []
        self._chains = Chains()
        self._copied: list[Tracked] = []
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
        elif wish.refresh is not None:
            self._begin_refresh(tracked, wish.refresh)
        elif wish.splice:
            self._begin_splice(tracked)

    def _track(self, request: Any, wish: Wish, *, reason: str = "", said: object = None) -> Tracked:
        tracked = Tracked(request, wish)
        self._tracked[request.request_id] = tracked
        if reason:
            self._refuse(tracked, reason, said)
        return tracked

    def _begin_compile(self, tracked: Tracked) -> None:
        wish, request = tracked.wish.compile, tracked.request
        assert wish is not None
        reason = ""
        if not self._config.allow_compile:
            reason = "compile_not_allowed"
        elif self._num_workers > 1:
            reason = "compile_needs_one_worker"
        elif self._config.store is None:
            reason = "no_store"
        elif wish.preamble_tokens >= request.num_prompt_tokens or not is_plain(request):
            reason = "nothing_to_compile"
        if reason:
            tracked.wish = Wish(splice=False)
            self._refuse(tracked, reason, None)
        else:  # every token is computed, behind nothing but the declared preamble
            request.skip_reading_prefix_cache = True

    def _begin_refresh(self, tracked: Tracked, wish: RefreshWish) -> None:
        request, reason = tracked.request, ""
        if not self._config.allow_refresh:
            reason = "refresh_not_allowed"
        elif not self._jumps or self.block_size != self.hash_block_size:
            reason = "refresh_needs_our_scheduler"
        elif len(self._manager.kv_cache_config.kv_cache_groups) > 1:
            reason = "refresh_needs_one_kind_of_layers"
        elif not is_plain(request) or request.skip_reading_prefix_cache:
            reason = "prompt_logprobs"
        if not reason:
            fingerprint = self._served.identity.fingerprint
            refresher = Refresher(
                fingerprint, self.block_size, lambda name: bool(self._block(name))
            )
            try:
                tracked.plan = refresher.plan(request, wish, self._chains)
            except PlanError as error:
                reason = error.message
        if reason:
            return self._refuse(tracked, reason, None)
        assert tracked.plan is not None
        salt_request(request, tracked.plan.salts(self.hash_block_size), self.hash_block_size)

    def _block(self, name: bytes) -> Any:
        """Return the block of a name; None if it is not cached."""
        found = self._manager.block_pool.get_cached_block(name, [0])
        return found[0] if found else None

    def _hold(self, tracked: Tracked, load: Load) -> bool:
        """Keep the blocks of a load from being evicted; if one is gone, give the plan up."""
        self._let_go(tracked)
        blocks = [self._block(name) for name in load.names]
        if not all(blocks):
            self._refuse(tracked, "refresh_evicted", None)
            return False
        self._manager.block_pool.touch(blocks)
        tracked.held = blocks
        return True

    def _let_go(self, tracked: Tracked) -> None:
        held, tracked.held = tracked.held, []
        if held:
            self._manager.block_pool.free_blocks(held)

    def _begin_splice(self, tracked: Tracked) -> None:
        request, wish = tracked.request, tracked.wish
        if not is_plain(request):
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
        tracked.num_loaded = 0
        plan = tracked.plan
        if not self._jumps and num_computed < plan.loads[0].target_start:
            self._refuse(tracked, "prefix_not_cached", None)
        elif not self._opened(tracked, plan.keys_behind(num_computed)):
            return None
        if tracked.plan is None:
            # vLLM has just looked for the blocks of the plan: it has to look for plain ones
            return None
        tracked.promised.clear()
        position = num_computed
        while (load := self.due(request, position)) is not None:
            if load.names and not self._hold(tracked, load):
                return None  # as above
            tracked.promised.append(load)
            position = load.target_stop
        return position - num_computed

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

    def loads_now(self, request: Any, load: Load) -> bool:
        """Have the step in which this request is scheduled next load this first, if it can."""
        tracked = self._tracked[request.request_id]
        if load.names and not self._hold(tracked, load):
            return False
        tracked.due.append(load)
        return True

    def allocated(self, request: Any, num_external: int) -> None:
        """Take note that vLLM has made room for what `num_matched` promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.plan is None:
            return
        if num_external:
            assert sum(load.num_tokens for load in tracked.promised) == num_external
            tracked.due += tracked.promised

    # -- segments that workers open ----------------------------------------------------------

    def _opened(self, tracked: Tracked, keys: Sequence[str]) -> bool:
        """Whether nothing has to be waited for: segments are open, or the plan is given up."""
        missing = self._open.missing(keys)
        if not missing:
            return True
        now = time.monotonic()
        if tracked.waits_until is None:
            tracked.waits_until = now + self._config.deadline_seconds
            self.stats.count("deferrals")
        elif now > tracked.waits_until:
            self._refuse(tracked, "deadline", None)
            return True
        self._open.want(missing)
        return False

    def update(self, news: WorkerNews) -> None:
        """Take in what the workers have said."""
        if opened := self._open.update(news):
            self.stats.count("opened", opened)
        for key, said in news.failed.items():
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

    def _with(self, key: str) -> Iterable[Tracked]:
        tracked = self._tracked.values()
        return [t for t in tracked if t.plan is not None and key in t.plan.keys]

    def _take_back(self, tracked: Tracked, said: str) -> None:
        """Have a request computed whose load failed: vLLM computes from before the load on.

        Its blocks have the plan's names already, and will hold something else.
        """
        if not self._jumps and tracked.plan is not None:  # else the scheduler has freed them
            (blocks,) = self._manager.get_block_ids(tracked.request.request_id)
            first = tracked.plan.loads[0].target_start // self.block_size
            self._manager.evict_blocks(set(blocks[first:]))
        tracked.num_loaded = 0
        self._refuse(tracked, "load_failed", said)

    def _refuse(self, tracked: Tracked, reason: str, said: object) -> None:
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
        for copied in self._copied:  # in the step before
            self._let_go(copied)
        self._copied.clear()
        for request_id, number in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.wish.compile is not None:
                captures += self._capture(tracked, number)
            if tracked.plan is not None and not tracked.counted:
                tracked.counted = True
                self.stats.count("plans")
                self.stats.count("seam_tokens", tracked.plan.num_seam_tokens)
            for load in tracked.due:
                blocks = self._manager.get_block_ids(request_id)
                source = tuple(block.block_id for block in tracked.held) if load.names else ()
                injections.append(Injection(request_id, load, blocks, source))
                if source:
                    self._copied.append(tracked)
                self._count(tracked, load)
            tracked.due.clear()
        ended = tuple(self._ended)
        self._ended.clear()
        wanted = {key for t in self._tracked.values() if t.plan for key in t.plan.keys}
        return StepMeta(*self._open.take(wanted), tuple(injections), tuple(captures), ended)

    def _count(self, tracked: Tracked, load: Load) -> None:
        tracked.num_loaded += load.num_tokens
        self.stats.count("loads")
        self.stats.count("loaded_tokens", load.num_tokens)

    def _capture(self, tracked: Tracked, num_scheduled: int) -> list[Capture]:
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

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; return what its reply says about the splice."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked not in self._copied:
            self._let_go(tracked)
        if self._config.allow_refresh and tracked.plan is not None:
            plain = hashes_of(request, request.all_token_ids)
            self._chains.keep(plain, request.block_hashes)
        if tracked.wish.compile is not None:
            self._ended.append(request.request_id)
            return {KEY: {"segment": self._key_of(tracked)}}
        if tracked.plan is None and not tracked.reason:
            return None
        if tracked.plan is not None and tracked.counted:
            num_local = tracked.plan.num_loaded - tracked.num_loaded
            self.stats.count("local_tokens", max(0, num_local))
        return {KEY: tracked.said()}

    def _key_of(self, tracked: Tracked) -> str:
        """Return the key that a compiled prompt has in the store."""
        wish = tracked.wish.compile
        assert wish is not None
        run = compiled_run(tracked.request.prompt_token_ids, wish)
        return content_key(
            "segment", self._config.tenant, self._served.identity.fingerprint, run.digest
        )
