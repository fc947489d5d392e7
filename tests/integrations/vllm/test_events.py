"""Events for routers: what is stored is announced under the hashes by which the engine announces its own blocks."""

from __future__ import annotations

import time
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


def test_blocks_that_a_full_store_drops_are_announced_as_removed(model: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: of the blocks that a follower of the events believes in, the disk has every chunk; of those that were
    removed it lacks one."""
    from vllm.config import KVEventsConfig

    options: dict[str, Any] = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    chunks: dict[tuple[int, Any], list[bytes]] = {}
    with engine(model("gemma3"), {"store": f"{tmp_path}:3MiB"}, **options) as made:
        published: list[Any] = []
        made.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
        connector = made.scheduler.connector
        add = connector._announced.add

        def noted(group: Any, size: int, prefixes: Any, first: int, hashes: Any) -> None:
            for block, name in enumerate(hashes, first):
                rows = range(block * group.block_tokens, (block + 1) * group.block_tokens)
                chunks[group.number, name] = [prefixes[chunk].tobytes() for chunk in {row // size for row in rows}]
            add(group, size, prefixes, first, hashes)

        connector._announced.add = noted
        for seed in range(4):
            made.one(tokens(700, seed=90 + seed))
            made.settle()
        published.extend(connector.take_events())
        connector._store.flush()
        tier = connector._store.tier_stack.executors[0].tier
        evicted, newest = tier.stats().evicted, tier.keys()[-1]
        tier.delete([newest])
        for _ in range(3):  # an answer that was under way, a question, and its answer
            time.sleep(0.3)
            published.extend(connector.take_events())
        there, groups_of = {*tier.keys()}, connector._announced._groups_of
        full = {group.number for group in connector._groups if group.reach.span is None}
    believed, gone = set[tuple[int, Any]](), set[tuple[int, Any]]()
    for event in (event for event in published if event.medium == "STORAGE"):
        assert event.ownership == "kvweave"
        names = {(event.group_idx, name) for name in event.block_hashes}
        if type(event).__name__ == "BlockStored":
            believed, gone = believed | names, gone - names
        else:
            assert names <= believed, "removed, and never stored"
            believed, gone = believed - names, gone | names

    def num_missing(block: tuple[int, Any]) -> int:
        ids = [shard for shard, own in groups_of.items() if block[0] in own]
        return sum(newest[:8] + chunk + shard not in there for chunk in chunks[block] for shard in ids)

    assert evicted > 10
    assert {number for number, _ in gone} == {number for number, _ in chunks}
    assert {number for number, _ in believed} & full
    assert all(num_missing(block) == 0 for block in believed if block[0] in full)
    assert all(num_missing(block) > 0 for block in gone)
