"""`KVWeaveTier` under vLLM's own offloading, in the real engine. All of it is vLLM's but the worker that copies pages:
that one vLLM has for GPUs only (`host_offloading`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.integrations.vllm import KVWeaveTier
from tests.integrations.vllm.engines import Engine, engine, tokens

pytestmark = pytest.mark.slow
HOST_BYTES = 4 << 20
"""Of vLLM's host tier: some prompts."""
PROMPT, OTHERS = tokens(700), [tokens(700, seed=1 + number) for number in range(14)]


def offloading(model: Path, folder: Path, spec: str) -> AbstractContextManager[Engine]:
    from vllm.config import KVTransferConfig

    tier = {"type": "KVWeaveTier", "module_path": "kvweave.integrations.vllm", "store": f"{folder}:200MiB"}
    where = {"spec_name": spec, "spec_module_path": "tests.integrations.vllm.host_offloading"}
    settings = {**where, "cpu_bytes_to_use": HOST_BYTES, "secondary_tiers": [tier]}
    return engine(
        model,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        ),
    )


def forget(made: Engine) -> None:
    """Empty the engine's own prefix cache, when vLLM and the tier have stored everything."""
    manager = made.scheduler.connector.connector_scheduler.manager
    for _ in range(500):
        made.core.step()
        if not manager._jobs and made.llm.reset_prefix_cache():
            return
        time.sleep(0.01)
    raise AssertionError(f"jobs of vLLM's never ended: {manager._jobs}")


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "lfm2", "qwen3_next"])
def test_what_vllms_host_tier_evicted_comes_back_from_the_store_also_after_a_restart(
    name: str, model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_loaded, real = list[int](), KVWeaveTier.submit_load

    def counted(self: Any, job: Any) -> None:
        num_loaded.append(len(job.keys))
        real(self, job)

    monkeypatch.setattr(KVWeaveTier, "submit_load", counted)
    with offloading(model(name), tmp_path, "TieringOnCPU") as made:
        cold, own = made.one(PROMPT), made.one(PROMPT)
        forget(made)
        native = made.one(PROMPT)
        assert not num_loaded  # that was the host tier's
        for other in OTHERS:
            made.one(other, new_tokens=1)
        forget(made)
        loaded = made.one(PROMPT)
    assert num_loaded
    assert cold.cached == 0
    assert loaded.cached == native.cached == own.cached >= 384
    assert loaded.logprobs == native.logprobs == own.logprobs
    with offloading(model(name), tmp_path, "TieringOnCPU") as made:
        again = made.one(PROMPT)
    assert again.cached == own.cached
    assert again.logprobs == own.logprobs


def test_vllms_own_worker_for_its_host_tier_refuses_a_cpu(model: Callable[..., Path], tmp_path: Path) -> None:
    """When this fails, `host_offloading` is no longer needed."""
    with (
        pytest.raises(Exception, match="CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"),
        offloading(model("llama"), tmp_path, "TieringOffloadingSpec"),
    ):
        pass
