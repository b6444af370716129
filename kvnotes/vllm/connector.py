"""The plug-in itself: vLLM's interface for K/V from elsewhere, on both of its sides.

    --kv-transfer-config '{"kv_connector": "KVNotesConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvnotes.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"model": FILE, "store": FOLDER}}'

`kvnotes vllm serve` writes it. Here is only what vLLM calls; `scheduling` and `working` do it.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvnotes.errors import KVNotesError
from kvnotes.vllm.config import ConnectorConfig, JumpForm
from kvnotes.vllm.messages import StepMeta, WorkerNews
from kvnotes.vllm.metrics import SpliceMetrics, SpliceStats
from kvnotes.vllm.scheduler_name import is_ours
from kvnotes.vllm.scheduling import SchedulerSide
from kvnotes.vllm.served import read
from kvnotes.vllm.working import WorkerSide

logger = logging.getLogger(__name__)


class KVNotesConnector(KVConnectorBase_V1, SupportsHMA):
    """Splices compiled segments into prompts.

    A model or a set-up that it cannot serve exactly turns it off, with a line in the log: vLLM
    then computes everything, as without it.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        self._config = ConnectorConfig.of(extra)
        self._jumps = is_ours(vllm_config)
        self._num_workers = int(vllm_config.parallel_config.tensor_parallel_size)
        self._served = read(self._config.model)
        self._scheduling: SchedulerSide | None = None
        self._working: WorkerSide | None = None
        self.off_because = self._why_off(vllm_config, kv_cache_config)
        if self.off_because:
            logger.warning("kvnotes: nothing is spliced: %s", self.off_because)
        elif role == KVConnectorRole.SCHEDULER:
            self._scheduling = SchedulerSide(
                self._served, self._config, num_workers=self._num_workers, jumps=self._jumps
            )

    def _why_off(self, vllm_config: Any, kv_cache_config: Any) -> str:
        """Return why nothing can be spliced here, "" if it can."""
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
        if parallel.pipeline_parallel_size > 1:
            return "pipeline parallelism: a worker holds some layers only"
        if getattr(parallel, "decode_context_parallel_size", 1) > 1:
            return "context parallelism: a worker holds some tokens only"
        if vllm_config.speculative_config is not None:
            return "speculative decoding: a drafter's K/V are not in segments"
        if model.quantization and not self._served.identity.quantization:
            return f"the weights are quantized by vLLM ({model.quantization})"
        if any("Mamba" in type(group.kv_cache_spec).__name__ for group in groups):
            return "a layer keeps a recurrent state, which holds all earlier tokens at once"
        if any("MLA" in type(group.kv_cache_spec).__name__ for group in groups):
            return "its layers keep a latent vector, which vLLM's CPU build does not read exactly"
        if len(groups) > 1 and not self._jumps:
            return "layers of several kinds need the scheduler of kvnotes"
        return ""

    # -- in the workers ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the layers, once vLLM's cache is there."""
        if self.off_because:
            return
        config = self._vllm_config
        layers = config.compilation_config.static_forward_context
        try:
            self._working = WorkerSide(
                self._served,
                self._config,
                self._kv_cache_config.kv_cache_groups,
                layers,
                num_blocks=int(self._kv_cache_config.num_blocks),
                rank=_tensor_rank(),
                num_workers=self._num_workers,
                dtype=str(config.model_config.dtype).removeprefix("torch."),
                jumps=self._jumps,
            )
        except KVNotesError as error:
            self.off_because = error.message
            logger.warning("kvnotes: nothing is spliced: %s", error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._working is not None:
            self._working.begin(self._meta())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what this step needs."""
        if self._working is not None:
            self._working.load(self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return: loads are complete before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Return: what is compiled is taken where it is written."""

    def wait_for_save(self) -> None:
        """Finish the step."""
        if self._working is not None:
            self._working.finish()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load failed."""
        return set() if self._working is None else self._working.take_invalid()

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """Return what the scheduler has to know."""
        if self._working is not None:
            return self._working.take_news()
        meta = self._meta()  # off in this worker: nothing can be opened
        failed = {key: self.off_because for key in meta.open}
        return WorkerNews(failed=failed) if failed else None

    def _meta(self) -> StepMeta:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        return meta

    # -- in the scheduler --------------------------------------------------------------------

    @property
    def jump_form(self) -> JumpForm:
        """How the scheduler jumps."""
        return self._config.jump

    @property
    def scheduling(self) -> SchedulerSide | None:
        """The half in the scheduler; None where nothing is spliced."""
        return self._scheduling

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's cache manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduling is not None:
            block_size = int(self._vllm_config.cache_config.block_size)
            self._scheduling.bind(kv_cache_manager, block_size)

    def on_new_request(self, request: Any) -> None:
        """Plan a request."""
        if self._scheduling is None:
            return
        try:
            self._scheduling.on_new_request(request)
        except Exception:  # whatever a prompt does to us, it is computed
            logger.exception("kvnotes: request %s is computed", request.request_id)
            self._scheduling.give_up(request, "internal_error")

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that are computed."""
        if self._scheduling is None:
            return 0, False
        return self._scheduling.num_matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note that there is room for them."""
        if self._scheduling is not None:
            self._scheduling.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the workers have to do in this step."""
        return StepMeta() if self._scheduling is None else self._scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers have said."""
        news = connector_output.kv_connector_worker_meta
        if self._scheduling is not None and isinstance(news, WorkerNews):
            self._scheduling.update(news)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed."""
        return False, None if self._scheduling is None else self._scheduling.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same where layers have several kinds."""
        return self.request_finished(request, [])

    # -- metrics -----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> SpliceStats | None:
        """Return what was counted since the last call."""
        side = self._scheduling or self._working
        taken = None if side is None else side.stats.take()
        return None if taken is None or taken.is_empty() else taken

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SpliceStats:
        """Return counts that came from another process."""
        return SpliceStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SpliceMetrics:
        """Return the counters for `/metrics`."""
        return SpliceMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _tensor_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
