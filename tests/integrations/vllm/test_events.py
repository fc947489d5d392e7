"""Events for routers: what is stored is announced under the hashes by which the engine announces its own blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from tests.integrations.vllm.engines import engine, tokens

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["gemma3", "granite_hybrid"])
def test_stored_blocks_have_the_hashes_of_the_engines_own_events(
    name: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    from vllm.config import KVEventsConfig

    options: dict[str, Any] = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    with engine(model(name), {"store": f"{tmp_path}:100MiB"}, **options) as made:
        published: list[Any] = []
        made.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
        made.one(tokens(700))
        made.settle()
        published.extend(made.scheduler.connector.take_events())
        groups = made.scheduler.kv_cache_config.kv_cache_groups
    ours = [event for event in published if event.medium == "STORAGE"]
    theirs = [event for event in published if event.medium == "GPU"]
    assert {event.group_idx for event in ours} == {*range(len(groups))}
    assert {event.ownership for event in ours} == {"kvweave"}
    for number in range(len(groups)):
        stored = {value for event in ours if event.group_idx == number for value in event.block_hashes}
        cached = {value for event in theirs if event.group_idx == number for value in event.block_hashes}
        assert cached <= stored, f"group {number}: the engine keeps blocks that were not announced as stored"
        kinds = {event.kv_cache_spec_kind for event in theirs if event.group_idx == number}
        assert {event.kv_cache_spec_kind for event in ours if event.group_idx == number} == kinds
