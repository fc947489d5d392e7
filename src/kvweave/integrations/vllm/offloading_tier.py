"""A secondary tier for vLLM's own `OffloadingConnector`, for deployments that keep it.

    {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": N, "secondary_tiers": [
        {"type": "KVWeaveTier", "module_path": "kvweave.integrations.vllm", "socket": "/run/user/1000/kvweave.sock"}]}

vLLM's pages are opaque here: they are shared by engines of the same model, blocks and degrees only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvweave.integrations.engine_store import close_engine_store, open_engine_store
from kvweave.integrations.keyed_pages import KeyedPool, page_schema
from kvweave.integrations.vllm.page_store import PageStore
from kvweave.store import Namespace


class KVWeaveTier(SecondaryTierManager):  # type: ignore[misc]
    """Pages of vLLM's host tier in a store of kvweave's. Every call returns at once but `drain_jobs`."""

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        store: str = "",
        socket: str = "",
        weights: str = "",
        tenant: str = "",
    ) -> None:
        """`weights` names the model's weights, which vLLM knows by the model's name only."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        pages = np.asarray(primary_kv_view).view(np.uint8).reshape(len(primary_kv_view), -1)
        mapper = FileMapper.from_offloading_spec("", offloading_spec)
        namespace = Namespace(f"vllm {mapper.base_path} rank {mapper.rank}", weights, tenant=tenant)
        schema = page_schema([KeyedPool("page", pages.shape[1])])
        self._store = open_engine_store(store, socket, schema, mapper.fields["model_name"])
        self._pages = PageStore(self._store, namespace, pages)
        self._loads: dict[int, list[bytes]] = {}

    def lookup(self, key: bytes, req_context: Any) -> Any:
        found = self._pages.has(key, req_context.req_id)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        self._pages.ask()

    def submit_store(self, job_metadata: Any) -> None:
        self._pages.save(job_metadata.job_id, [*job_metadata.keys], job_metadata.chunk_ids)

    def submit_load(self, job_metadata: Any) -> None:
        self._loads[job_metadata.job_id] = keys = [*job_metadata.keys]
        self._pages.load(job_metadata.job_id, keys, job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[Any]:
        for number, num_pages, num_moved, seconds in self._pages.take_ended():
            keys = self._loads.pop(number, None)
            is_whole = num_moved == num_pages
            yield JobResult(
                job_id=number,
                success=is_whole,
                successful_keys=None if is_whole or keys is None else keys[:num_moved],
                transfer_time=seconds,
                transfer_bytes=num_moved * self.block_size_bytes,
            )

    def has_pending_work(self) -> bool:
        return self._pages.is_busy

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._pages.forget(req_context.req_id)

    def drain_jobs(self) -> None:
        self._pages.drain()

    def shutdown(self) -> None:
        self._pages.drain()
        close_engine_store(self._store)
