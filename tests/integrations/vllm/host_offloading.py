"""vLLM's tiering on a CPU. Its own worker asserts that KV is on a GPU; in its place is one that copies within the host.
Everything else is vLLM's: connector, manager, host tier and its memory, the factory of tiers."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies pages at once, chunks being of one block."""

    def __init__(self, caches: Any, region: Any) -> None:
        import torch

        self._region, self._refs = region, caches.group_data_refs
        pages = [(each.tensor, each.page_size_bytes) for each in caches.tensors]
        self._engine = [tensor.view(torch.int8).view(-1, size) for tensor, size in pages]
        self._host = [region.create_next_worker_view(size) for _, size in pages]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, self._engine, self._host, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, self._engine, self._host, to_host=False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, engine: Any, host: Any, *, to_host: bool) -> bool:
        moved, first = 0, 0
        for size, refs in zip(blocks.group_sizes, self._refs, strict=True):
            for block, chunk in zip(blocks.block_ids[first:][:size], chunks[first:][:size], strict=True):
                for ref in refs:
                    mine, theirs = engine[ref.tensor_idx][block], host[ref.tensor_idx][chunk]
                    target, source = (theirs, mine) if to_host else (mine, theirs)
                    target[: ref.page_size_bytes] = source[: ref.page_size_bytes]
                    moved += ref.page_size_bytes
            first += size
        self._done.append(TransferResult(job_id, success=True, transfer_size=moved, transfer_time=1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Jobs end when they are submitted."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class TieringOnCPU(TieringOffloadingSpec):  # type: ignore[misc]
    """As it is, but for the check for a GPU and the worker."""

    def get_worker(self, kv_caches: Any) -> HostCopies:
        region = SharedOffloadRegion(
            self._engine_id, self.num_chunks, self.config.parallel.rank, self.kv_bytes_per_chunk,
            self.cpu_page_size_per_worker,
        )  # fmt: skip
        return HostCopies(kv_caches, region)
