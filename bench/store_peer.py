"""The peer of bench/store.py: LMCache 0.5.6, run by its own interpreter. Answers lines that it reads by JSON."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import torch
from lmcache.cli.commands.bench.l2_adapter_bench import data
from lmcache.v1.distributed import api, config
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

CHUNK, NUM_TOKENS = 256, 131_072


def lookups(rounds: int) -> dict[str, float]:
    """Milliseconds to hash a prompt, make its keys and find all of them, by presence rows; unlocking is not counted."""
    memory = config.L1MemoryManagerConfig(size_in_bytes=1 << 30, use_lazy=False)
    eviction = config.EvictionConfig(eviction_policy="LRU")
    manager = StorageManager(config.StorageManagerConfig(config.L1ManagerConfig(memory), eviction))
    hasher, tokens = TokenHasher(CHUNK), list(range(NUM_TOKENS))
    layout = api.MemoryLayoutDesc([torch.Size([64])], [torch.uint8])
    found = {}
    for shards, (windows, ranks) in {1: ([-1], 1), 3: ([-1, 16, 1], 1), 24: ([-1, 16, 1], 8)}.items():
        key = IPCCacheServerKey(f"m{shards}", ranks, None, tuple(tokens), 0, NUM_TOKENS, "r", num_kv_readers=1)
        layouts = dict.fromkeys(range(len(windows)), layout)
        window = api.AttnWindowDesc(windows, world_size=ranks)

        def ask(key: Any = key, layouts: Any = layouts, window: Any = window) -> Any:
            hashes = hasher.compute_chunk_hashes(tokens, end=NUM_TOKENS)
            groups = api.ipc_key_to_grouped_object_keys(key, hashes, [*layouts], layouts, window)
            handle = manager.submit_prefetch_task(api.PrefetchTaskSpec(groups))
            assert manager.wait_prefetch_status(handle, 60)
            return groups, manager.query_prefetch_status(handle)

        groups, _ = ask()
        everything = [key for group in groups for key in group.keys]
        written = manager.reserve_write(everything, layout)
        assert len(written) == len(everything), (len(written), len(everything))
        manager.finish_write(everything)
        times = []
        for _ in range(10 * rounds):
            began = time.perf_counter()
            groups, result = ask()
            times.append(time.perf_counter() - began)
            locked = [
                key for group, cells in zip(groups, result.hit_cells, strict=True)
                for number, key in enumerate(group.keys) if cells.test(number)
            ]  # fmt: skip
            assert len(locked) >= NUM_TOKENS // CHUNK * ranks
            manager.finish_read_prefetched(locked)
        found[str(shards)] = 1e3 * min(times)
    manager.close()
    return found


def disk(path: str, direct: bool, count: int, size: int) -> Iterator[dict[str, float]]:
    """Round by round, seconds to store and to load `count` values by four native workers: one file a value, nothing
    synced, nothing checked."""
    os.makedirs(path)
    buffer = _aligned(2 * count * size)
    description = data.create_l1_memory_desc(buffer, align_bytes=4096)
    adapter = create_l2_adapter(FSNativeL2AdapterConfig(path, 4, use_odirect=direct), l1_memory_desc=description)
    sources = data.make_memory_objects(buffer, count, size, 0)
    targets = data.make_memory_objects(buffer, count, size, count * size, 7)
    for number in itertools.count():
        keys = data.make_object_keys(count, key_offset=number * count)
        began = time.perf_counter()
        task = adapter.submit_store_task(keys, sources)
        while task not in (done := adapter.pop_completed_store_tasks()):
            data.wait_eventfd(adapter.get_store_event_fd())
        seconds = {"store": time.perf_counter() - began}
        assert done[task].is_successful()
        loads = []
        for _ in range(2):
            began = time.perf_counter()
            task = adapter.submit_load_task(keys, targets)
            while (bits := adapter.query_load_result(task)) is None:
                data.wait_eventfd(adapter.get_load_event_fd())
            loads.append(time.perf_counter() - began)
            assert bits.popcount() == count
        assert data.verify_round_trip(keys, sources, targets, print)
        adapter.delete(keys)
        yield seconds | {"load": min(loads)}


def _aligned(num_bytes: int) -> torch.Tensor:
    backing = torch.empty(num_bytes + 4095, dtype=torch.uint8)
    offset = -backing.data_ptr() % 4096
    return backing[offset : offset + num_bytes]


def main() -> None:
    """The questions: lookup, page cache, O_DIRECT. The last two are for one round each."""
    wish = json.loads(sys.argv[1])
    places = {"page cache": False, "O_DIRECT": True}
    disks = {
        name: disk(f"{wish['path']}/lmcache-{int(direct)}", direct, wish["count"], wish["size"])
        for name, direct in places.items()
    }
    for question in map(str.strip, sys.stdin):
        answer = lookups(wish["rounds"]) if question == "lookup" else next(disks[question])
        print(json.dumps(answer), flush=True)


main()
