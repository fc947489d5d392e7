"""Counts of the connector, for vLLM's log and its Prometheus endpoint: `vllm:kvweave_*_total`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTED = {
    "lookups": "Lookups of prompts",
    "lookup_seconds": "Seconds from the start of a lookup until its answer was used",
    "tokens_found": "Tokens that the store had, of prompts that were looked up",
    "loads": "Loads that were begun",
    "tokens_loaded": "Tokens of these loads",
    "load_seconds": "Seconds that complete loads took",
    "short_loads": "Loads that ended before their hit, because something was lost, damaged or late",
    "computed_instead": "Hits that were computed, since that is faster",
    "saves": "Saves that were begun",
    "tokens_saved": "Tokens of these saves",
    "failed_saves": "Saves of which some pieces were not kept",
    "failed_pins": "Prompts that were not pinned, though their requests said so",
}


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """By name: how much was added since the last time."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(number, 4) for name, number in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {
            name: metric_types[Counter](f"vllm:kvweave_{name}", documentation=words, labelnames=labelnames)
            for name, words in COUNTED.items()
        }
        self._counters = {
            (name, engine): counter.labels(*values)
            for name, counter in made.items()
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            self._counters[name, engine_idx].inc(number)
