"""Counters of the plug-in, on vLLM's own `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "plans": "Requests that are made of compiled segments.",
    "loads": "Stretches of segments put into the cache.",
    "loaded_tokens": "Tokens whose K/V were put into the cache.",
    "loaded_bytes": "Bytes of these K/V.",
    "load_seconds": "Time spent on moving keys and putting K/V into the cache.",
    "local_tokens": "Tokens of plans that were in vLLM's own cache already.",
    "seam_tokens": "Tokens of segments that were computed at a splice.",
    "opened": "Segments opened and verified.",
    "compiled": "Segments compiled from requests.",
    "deferrals": "Requests that waited for a segment to be opened.",
}
"""Name to help text; each is `kvnotes:NAME_total`, but for seconds."""

REASONS = ("refused", "failed")
"""Counters with a reason: plans that were not made, and segments or loads that failed."""

_HELP = {
    "refused": "Requests that could have been spliced and are computed, by reason.",
    "failed": "Segments that could not be opened, loaded or compiled, by reason.",
}


class SpliceStats(KVConnectorStats):
    """Counts since they were last taken: `{name: number}`, with a reason `name/reason`."""

    data: dict[str, int | float]

    def count(self, name: str, number: int | float = 1, reason: str = "") -> None:
        """Add to a counter."""
        key = f"{name}/{reason}" if reason else name
        self.data[key] = self.data.get(key, 0) + number

    def take(self) -> SpliceStats:
        """Return what was counted, and begin at zero."""
        taken, self.data = SpliceStats(data=self.data), {}
        return taken

    def reset(self) -> None:
        """Begin at zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> SpliceStats:
        """Return the sum of both."""
        result = SpliceStats(data=dict(self.data))
        for name, number in other.data.items():
            result.data[name] = result.data.get(name, 0) + number
        return result

    def reduce(self) -> dict[str, int | float]:
        """Return what the log shows."""
        return {name: round(number, 4) for name, number in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class SpliceMetrics(KVConnectorPromMetrics):
    """The same as counters of Prometheus."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            name: self._counter_cls(f"kvnotes:{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._by_reason = {
            name: self._counter_cls(
                name=f"kvnotes:{name}",
                documentation=_HELP[name],
                labelnames=[*labelnames, "reason"],
            )
            for name in REASONS
        }
        for engine in per_engine_labelvalues.values():
            for counter in self._plain.values():
                counter.labels(*engine)  # counters are there, at zero, before the first event

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, number in transfer_stats_data.items():
            name, _, reason = key.partition("/")
            if name in self._plain:
                self._plain[name].labels(*engine).inc(number)
            elif name in self._by_reason:
                self._by_reason[name].labels(*engine, reason).inc(number)
