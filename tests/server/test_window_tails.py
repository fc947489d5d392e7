"""A daemon finds, leases, pins and fetches the tails of windows like anything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvweave.errors import BadRequest
from kvweave.server import RemoteStore
from kvweave.server.registered_model import RegisteredModel, registration
from kvweave.store import DictTier, Schema, Shard, TierPolicy, TierStack
from kvweave.store.keys import Bytes
from tests.server.models import serving, settings, store_prompt
from tests.store.models import hybrid, truth

SCHEMA = Schema.of(hybrid(), parts=2, tails=True)
LENGTH = 1024


class LastWindow:
    """Payloads of an engine that has given back all pages of windows before token 725."""

    def holds(self, shard: Shard, chunk: int) -> bool:
        return shard.tag != "window" or shard.tokens(chunk)[0] >= 725

    def __call__(self, shard: Shard, chunk: int) -> Bytes:
        assert self.holds(shard, chunk)
        return truth(shard, chunk)


@pytest.fixture(params=["memory", "tier"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RemoteStore]:
    backing = TierStack((DictTier(), TierPolicy(write="through"))) if request.param == "tier" else None
    with serving(settings(tmp_path), backing) as daemon:
        opened = RemoteStore(SCHEMA, daemon.settings.socket, model="hybrid")
        yield opened
        opened.close()


def test_a_point_whose_window_is_only_a_tail_is_found_and_loaded(store: RemoteStore) -> None:
    prompt, given = store_prompt(range(LENGTH + 1)), list[tuple[str, int, int]]()
    assert store.save(prompt, LastWindow(), points=[LENGTH]).dropped == 0

    def sink(shard: Shard, chunk: int, payload: Bytes) -> None:
        assert np.array_equal(payload, truth(shard, chunk))
        given.append((shard.tag, shard.first_token, chunk))

    hit = store.lookup(prompt)
    assert hit.position == LENGTH
    assert store.prefetch(hit).result(20) == LENGTH
    pin = store.pin(hit)
    assert pin.position == LENGTH
    store.unpin(pin)
    assert store.load(store.lookup(prompt), sink) == LENGTH
    assert sorted({piece for piece in given if piece[0] == "window"}) == [("window", 0, 3), ("window", 213, 2)]
    assert store.lookup(store_prompt(range(700))).position == 0


def test_a_schema_whose_tails_do_not_match_its_chunks_is_refused() -> None:
    said = registration(1, "hybrid", SCHEMA)
    assert RegisteredModel(said).num_shards == len(SCHEMA.shards)
    window = next(group for group in SCHEMA.groups if group.tail_start)
    for shards in ([*SCHEMA.shards[: window.stop - 1], SCHEMA.shards[0]], [*reversed(SCHEMA.shards)]):
        other = registration(1, "hybrid", replace(SCHEMA, shards=tuple(shards)))
        lied = msgspec.structs.replace(said, shards=[*other.shards, *said.shards[len(other.shards) :]])
        with pytest.raises(BadRequest, match="no chunks and their tails"):
            RegisteredModel(lied)
