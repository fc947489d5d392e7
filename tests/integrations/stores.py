"""Stores for tiny models, in chunks so short that prompts of few tokens have several; and what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvweave.integrations.transformers import KVWeave, StoreUsage
from kvweave.integrations.transformers.support import examine
from kvweave.integrations.transformers.weave import plan_for
from kvweave.store import DictTier, Schema, Store, Tier, TierPolicy, TierStack
from tests.integrations.models import prompt

CHUNK = 64
CLOSE = 2e-5
NEAR = TierPolicy(inline=True)


def chunk_of(model: Any) -> int:
    groups = plan_for(examine(model), "1GiB", CHUNK).groups
    return math.lcm(CHUNK, *(group.block_tokens for group in groups))


def store_of(model: Any, tier: Tier, policy: TierPolicy = NEAR) -> Store:
    return Store(Schema.of(examine(model).stored, chunk_tokens=chunk_of(model)), TierStack((tier, policy)))


@contextmanager
def started(model: Any, tier: Tier, memory: int | str = "64MiB", **options: Any) -> Iterator[KVWeave]:
    """A new KVWeave over what a tier holds: what a process that was started again has."""
    options = {"rows": 32, "max_tokens": 2048, "weights": "these", "store": store_of(model, tier), **options}
    with KVWeave(model, memory, **options) as weave:
        yield weave
        assert weave.core.stats().sequences == 0, "a row was left open"
        assert all(group.held == 0 for group in weave.core.stats().groups)


def use_of(weave: KVWeave) -> StoreUsage:
    use = weave.stats().store
    assert use is not None
    return use


def open_store_of(weave: KVWeave) -> Any:
    assert weave.store is not None
    return weave.store


class Damaged(DictTier):
    """These blobs, every n-th with one bit flipped."""

    def __init__(self, blobs: dict[bytes, bytes], every: int = 1) -> None:
        super().__init__()
        for number, (key, blob) in enumerate(blobs.items()):
            flipped = bytearray(blob)
            if number % every == every - 1:
                flipped[-1 - number % 50] ^= 4
            self.blobs[key] = bytes(flipped)


def leaving(ids: torch.Tensor, at: int, seed: int = 3) -> torch.Tensor:
    """A prompt as long as `ids`, which goes its own way from token `at` on."""
    return torch.cat([ids[:, :at], prompt(ids.shape[1] - at, seed=seed)], dim=1)
