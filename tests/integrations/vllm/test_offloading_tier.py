"""The tier against vLLM's own classes: found by its factory, and driven as its manager drives tiers."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
pytestmark = pytest.mark.slow


def offloading_spec() -> Any:
    """The fields that vLLM's own file tier reads."""
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False)
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layers.0"])],
        parallel=parallel,
        canonical_layout=False,
        replicated_layout=False,
        model=SimpleNamespace(name="m", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16),
    )
    return SimpleNamespace(config=config)


def test_pages_go_to_a_store_and_come_back_after_a_restart(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(3)]
    context = ReqContext("r")
    config = {"type": "KVWeaveTier", "module_path": "kvweave.integrations.vllm", "store": f"{tmp_path}:50MiB"}

    def made(memory: np.ndarray[Any, Any]) -> Any:
        return SecondaryTierFactory.create_secondary_tier(config, memoryview(memory.data), offloading_spec())

    def looked_up(tier: Any, key: bytes) -> Any:
        while (found := tier.lookup(key, context)) is LookupResult.RETRY:
            tier.on_schedule_end(None)
            time.sleep(0.001)
        return found

    written = np.random.default_rng(0).integers(-128, 128, (8, 4096), np.int8)
    tier = made(written.copy())
    assert looked_up(tier, keys[0]) is LookupResult.MISS
    tier.submit_store(TransferJob(1, keys[:2], np.array([5, 3]), False, context))
    tier.drain_jobs()
    (stored,) = tier.get_finished_jobs()
    assert (stored.job_id, stored.success) == (1, True)
    tier.shutdown()

    memory = np.zeros((8, 4096), np.int8)
    tier = made(memory)
    assert [looked_up(tier, key) for key in keys] == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    tier.submit_load(TransferJob(2, keys, np.array([0, 1, 2]), True, context))
    tier.drain_jobs()
    (loaded,) = tier.get_finished_jobs()
    assert (loaded.success, loaded.successful_keys) == (False, keys[:2])
    np.testing.assert_array_equal(memory[:2], written[[5, 3]])
    assert not memory[2:].any()
    assert not tier.has_pending_work()
    tier.shutdown()
