"""The thin line: register, reserve, write, commit, look up, read, release; in memory alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.errors import StoreError
from kvweave.server import Limits
from kvweave.store import Saved, Shard
from kvweave.store.keys import Bytes
from tests.server.models import POINTS, SCHEMA, prompt, serving, settings, store, store_prompt, verify
from tests.store.models import truth


def test_what_one_client_saves_another_loads_bit_for_bit(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        writer, reader = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        assert writer.lookup(prompt()).position == 0
        saved = writer.save(prompt(), truth, points=POINTS)
        assert saved == Saved(stored=saved.stored) != Saved()
        assert writer.save(prompt(), truth, points=POINTS) == Saved(present=saved.stored)
        hit = reader.lookup(prompt())
        assert hit.position == 1024
        assert daemon.report().clients[0].leases + daemon.report().clients[1].leases == 1
        given: list[tuple[str, int, int]] = []

        def sink(shard: Shard, chunk: int, found: Bytes) -> None:
            verify(shard, chunk, found)
            given.append((shard.tag, shard.part, chunk))

        assert reader.load(hit, sink) == 1024
        assert len(given) == len({*given}) == sum(len([*shard.needs(1024)]) for shard in SCHEMA.shards)
        assert all(client.leases == 0 for client in reader.report().clients)
        writer.close()
        reader.close()


def test_payloads_can_be_loaded_straight_into_memory_of_the_callers(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        memory = {
            (shard, chunk): np.zeros(shard.payload_bytes, np.uint8) for shard in SCHEMA.shards for chunk in range(4)
        }
        assert client.load_into(client.lookup(prompt()), lambda shard, chunk: memory[shard, chunk]) == 1024
        for shard in SCHEMA.shards:
            for chunk in shard.needs(1024):
                verify(shard, chunk, memory[shard, chunk])
        client.close()


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32])
def test_payloads_can_be_loaded_into_memory_of_any_type_and_shape(tmp_path: Path, dtype: type[Any]) -> None:
    with serving(settings(tmp_path)), store(tmp_path / "kv.sock") as client:
        client.save(prompt(), truth)
        given: dict[tuple[Shard, int], Any] = {}

        def target(shard: Shard, chunk: int) -> Any:
            given[shard, chunk] = np.zeros(shard.payload_bytes, np.uint8).view(dtype).reshape(2, -1)
            return given[shard, chunk]

        assert client.load_into(client.lookup(prompt()), target) == 1024
        for (shard, chunk), memory in given.items():
            verify(shard, chunk, memory.reshape(-1).view(np.uint8))


@pytest.mark.parametrize(
    "given",
    [
        None,
        bytearray(1 << 16),
        np.zeros(7, np.uint8),
        np.zeros(1 << 16, np.uint8)[::-2],
        np.broadcast_to(np.uint8(0), 1 << 16),
        np.full(1 << 16, None),
    ],
)
def test_a_target_that_gives_something_else_is_an_error_of_that_load_alone(tmp_path: Path, given: Any) -> None:
    with serving(settings(tmp_path)), store(tmp_path / "kv.sock") as client:
        client.save(prompt(), truth)
        with pytest.raises(StoreError, match=r"the target gave .*, an array of \d+ at least"):
            client.load_into(client.lookup(prompt()), lambda *_: given)
        assert client.load(client.lookup(prompt()), verify) == 1024


def test_a_client_closes_what_it_used_least_recently(tmp_path: Path) -> None:
    few = Limits(sequences=8, keys=48 * 8)
    with serving(settings(tmp_path, limits=few)) as daemon:
        client = store(tmp_path / "kv.sock")
        for number in range(12):
            assert client.save(prompt(number), truth, points=[256]).dropped == 0
            assert client.lookup(prompt(number)).position == 256
        (report,) = daemon.report().clients
        assert report.sequences == 4
        assert report.leases <= 4
        assert client.lookup(prompt(0)).position == 256
        assert client.unreachable == 0
        client.close()


def test_a_prompt_shorter_than_a_chunk_is_a_miss_without_a_word(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        before = daemon.report().requests
        assert client.load(client.lookup(store_prompt(range(10))), verify) == 0
        assert client.save(store_prompt(range(10)), truth) == Saved()
        assert daemon.report().requests == before
        client.close()


def test_a_payload_of_another_size_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        with pytest.raises(StoreError, match="is needed"):
            client.save(prompt(), lambda shard, chunk: np.zeros(3, np.uint8))
        assert client.report().tiers[0].tier.used_bytes == 0
        client.close()
