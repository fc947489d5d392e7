"""The joint hit equals vLLM's own, on random groups and random presence patterns.

vLLM's coordinator is the one its engine makes (HybridKVCacheCoordinator), with hashes of the blocks' common divisor and
hits on their common multiple. Restricted to what it supports, or means the same by:

- windows of at least 2 tokens: of a window of 1 vLLM wants a block that no token will read;
- chunks only where all blocks are equal, and of whole blocks: vLLM refuses others, or calls more of a cut chunk found;
- hits between blocks: for states it can be asked to look inside a block (copy on write of half a block), which is
  switched off (`allow_partial_hash_hits`);
- no block dropped for drafts (EAGLE), no context parallelism.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import numpy as np
import pytest

from kvweave.prefix import Present, joint_hit
from kvweave.spec import Chunk, Full, Reach, State, Window

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm")

import torch
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.slow

CONFIGURATIONS = 400
PATTERNS = 30
BLOCKS = (1, 2, 3, 4, 6, 8, 16)
Kind = tuple[Reach, int]
"""A reach, and the tokens of a block."""


def random_kinds(choose: random.Random) -> list[Kind]:
    count = choose.randint(2, 4)
    sizes = choose.choices(BLOCKS, k=count) if choose.random() < 0.6 else [choose.choice(BLOCKS)] * count
    reaches = [Full, Window, State, Chunk] if len(set(sizes)) == 1 else [Full, Window, State]
    kinds: list[Kind] = []
    for size in sizes:
        reach = choose.choice(reaches)
        if reach is Window:
            kinds.append((Window(choose.randint(2, 6 * size + 2)), size))
        elif reach is Chunk:
            kinds.append((Chunk(size * choose.randint(1, 6)), size))
        else:
            kinds.append((reach(), size))
    return kinds


def vllm_spec(reach: Reach, size: int) -> Any:
    shape = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    match reach:
        case Window(tokens):
            return SlidingWindowSpec(sliding_window=tokens, **shape)
        case Chunk(tokens):
            return ChunkedLocalAttentionSpec(attention_chunk_size=tokens, **shape)
        case State():
            return MambaSpec(block_size=size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")
        case _:
            return FullAttentionSpec(**shape)


class Coordinator:
    """vLLM's coordinator over a few groups, whose cached blocks are as told."""

    def __init__(self, kinds: list[Kind], num_tokens: int) -> None:
        self.sizes = [size for _, size in kinds]
        self.grid, self.unit = math.lcm(*self.sizes), math.gcd(*self.sizes)
        groups = [KVCacheGroupSpec([f"layer{i}"], vllm_spec(*kind)) for i, kind in enumerate(kinds)]
        self.coordinator = get_kv_cache_coordinator(
            KVCacheConfig(2, [], groups),
            max_model_len=num_tokens,
            max_in_flight_tokens=num_tokens,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.grid,
            hash_block_size=self.unit,
            allow_partial_hash_hits=False,
        )
        assert isinstance(self.coordinator, HybridKVCacheCoordinator)
        self.hashes = [i.to_bytes(32, "big") for i in range(num_tokens // self.unit)]

    def hit(self, present: list[np.ndarray[Any, np.dtype[np.bool_]]], limit: int) -> int:
        pool = self.coordinator.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        for number, (size, blocks) in enumerate(zip(self.sizes, present, strict=True)):
            for index in np.flatnonzero(blocks).tolist():
                last = self.hashes[(index + 1) * size // self.unit - 1]
                pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(last, number), pool.blocks[1])
        return int(self.coordinator.find_longest_cache_hit(self.hashes, limit)[1])


def test_joint_hit_is_what_vllm_finds() -> None:
    choose = random.Random(3)
    noise = np.random.default_rng(3)
    found = {"nothing": 0, "some": 0, "all": 0}
    for _ in range(CONFIGURATIONS):
        kinds = random_kinds(choose)
        grid = math.lcm(*(size for _, size in kinds))
        num_tokens = grid * choose.randint(1, 12)
        coordinator = Coordinator(kinds, num_tokens)
        for _ in range(PATTERNS):
            shares = noise.choice([0.3, 0.6, 0.9, 0.97, 1.0], len(kinds))
            present = [noise.random(num_tokens // size) < share for share, (_, size) in zip(shares, kinds, strict=True)]
            limit = choose.randint(0, num_tokens)
            groups = [Present(reach, size, blocks) for (reach, size), blocks in zip(kinds, present, strict=True)]
            ours = joint_hit(groups, grid, limit)
            assert ours == coordinator.hit(present, limit), f"{kinds}, up to {limit}: {[p.tolist() for p in present]}"
            found["nothing" if not ours else "all" if ours == limit // grid * grid else "some"] += 1
    assert min(found.values()) > CONFIGURATIONS, f"one-sided: {found}"
