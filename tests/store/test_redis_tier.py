"""The Redis tier keeps its contract against a real server and a real cluster, which are killed and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.errors import ConfigError, TierError, TierFull
from kvweave.store import MemoryTier, Store, Tier, TierPolicy, TierStack
from tests.store.contract import KeepingContract, TierContract, got, key, put, value
from tests.store.faults import SCHEMA, FaultContract, keys_of, payload, saved, verify
from tests.store.servers import Redis, RedisCluster, wait_until

pytestmark = pytest.mark.slow
redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvweave[redis]'")

from kvweave.store.redis_tier import RedisTier  # noqa: E402
from kvweave.store.tier import UNREADABLE  # noqa: E402


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    with server.running():
        yield server


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    with cluster.running():
        yield cluster


@pytest.fixture
def cluster(whole_cluster: RedisCluster) -> RedisCluster:
    """Empty, whatever earlier tests left there."""
    for node in whole_cluster.nodes:
        redis.Redis.from_url(node.url).flushall()
    return whole_cluster


class TestRedis(TierContract, KeepingContract, FaultContract):
    @pytest.fixture
    def tier(self, server: Redis) -> Iterator[Tier]:
        tier = RedisTier(server.url)
        yield tier
        tier.close()

    @pytest.fixture
    def reopen(self, server: Redis) -> Any:
        return lambda: RedisTier(server.url)


class TestRedisCluster(TierContract, KeepingContract, FaultContract):
    @pytest.fixture
    def tier(self, cluster: RedisCluster) -> Iterator[Tier]:
        tier = RedisTier(cluster.url)  # nobody says that it is a cluster
        yield tier
        tier.close()

    @pytest.fixture
    def reopen(self, cluster: RedisCluster) -> Any:
        return lambda: RedisTier(cluster.url)


class Line:
    """Counts what goes over the connections of a tier: round trips, and the commands in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trips: list[int] = []
        self.largest = 0
        pack = redis.connection.AbstractConnection.pack_commands

        def counted(connection: Any, commands: Any) -> Any:
            commands = [*commands]
            packed = pack(connection, commands)
            self.trips.append(len(commands))
            self.largest = max(self.largest, sum(map(len, packed)))
            return packed

        monkeypatch.setattr(redis.connection.AbstractConnection, "pack_commands", counted)


def check_round_trips(tier: RedisTier, line: Line, at_most: int) -> None:
    """24 values of 512 KiB, in batches of at most 4 MiB."""
    size, numbers = 512 << 10, range(24)
    tier.contains([key(0)])
    line.trips.clear()
    assert put(tier, *numbers, length=size) == [True] * 24
    assert (sum(line.trips), len(line.trips) <= at_most) == (24, True)
    assert line.largest < (4 << 20) + 4096
    line.trips.clear()
    buffers = [np.zeros(size, np.uint8) for _ in numbers]
    assert tier.get([key(n) for n in numbers], buffers) == [size] * 24
    assert (sum(line.trips), len(line.trips) <= at_most) == (24, True)
    assert all(buffers[n].tobytes() == value(n, size) for n in numbers)
    line.trips.clear()
    assert tier.contains([key(n) for n in range(48)]).sum() == 24
    assert tier.delete([key(n) for n in range(48)]) == 24
    assert len(line.trips) <= 2 * at_most // 3


def test_values_go_to_a_server_and_come_back_in_a_round_trip_for_every_4_mib(
    server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = RedisTier(server.url)
    check_round_trips(tier, Line(monkeypatch), at_most=3)
    tier.close()


def test_values_go_to_a_cluster_and_come_back_in_a_round_trip_a_node_for_every_4_mib(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = RedisTier(cluster.url)
    check_round_trips(tier, Line(monkeypatch), at_most=9)
    tier.close()


@pytest.mark.parametrize("is_cluster", [False, True])
def test_something_foreign_in_a_batch_is_unreadable_and_the_others_are_whole(
    is_cluster: bool, request: pytest.FixtureRequest
) -> None:
    tier = RedisTier(request.getfixturevalue("cluster" if is_cluster else "server").url)
    put(tier, 1, 3)
    tier._server.rpush(b"kvweave:" + key(2), b"somebody's list")
    buffers = [np.zeros(len(value(n)), np.uint8) for n in (1, 2, 3)]
    lengths = tier.get([key(n) for n in (1, 2, 3)], buffers)
    assert lengths == [len(value(1)), UNREADABLE, len(value(3))]
    assert [buffers[0].tobytes(), buffers[2].tobytes()] == [value(1), value(3)]  # no answer is taken for another's
    tier.close()


def stores(tier: RedisTier) -> tuple[Store, Store]:
    """One with memory before the tier, and one with the tier alone."""
    policy = TierPolicy(deadline_s=0.5, cool_s=0.1, retries=1)
    near = Store(SCHEMA, TierStack((MemoryTier("4MiB"), TierPolicy(inline=True)), (tier, policy)))
    return near, Store(SCHEMA, TierStack((tier, TierPolicy(inline=True))))


def check_without_the_tier(store: Store) -> None:
    prompt = saved(MemoryTier("4MiB"))[1]
    for _ in range(6):
        began = time.monotonic()
        assert store.load(store.lookup(prompt), verify) == 1024
        assert time.monotonic() - began < 2
    assert store.stats().tiers[1].open


def check_used_again(store: Store, alone: Store) -> None:
    """The near tier has it; what came back without it gets it again."""
    prompt = saved(MemoryTier("4MiB"))[1]

    def is_there() -> bool:
        store.save(prompt, payload)
        return alone.lookup(prompt).position == 1024 and not store.stats().tiers[1].open

    wait_until(is_there, "the tier is used again")
    assert alone.load(alone.lookup(prompt), verify) == 1024


def test_a_server_that_is_killed_and_comes_back_is_used_again(server: Redis) -> None:
    tier = RedisTier(server.url, timeout_s=0.5)
    store, alone = stores(tier)
    store.save(saved(MemoryTier("4MiB"))[1], payload)
    server.kill()
    with pytest.raises(TierError):
        tier.contains([key(1)])
    check_without_the_tier(store)
    server.start()
    check_used_again(store, alone)
    store.close()


def test_a_cluster_that_loses_a_node_is_used_again_when_the_node_is_back(cluster: RedisCluster) -> None:
    tier = RedisTier(cluster.url, timeout_s=0.5)
    store, alone = stores(tier)
    store.save(saved(MemoryTier("4MiB"))[1], payload)
    cluster.nodes[0].kill()
    keys = [key(n << 8) for n in range(64)]  # some of them are the dead one's
    with pytest.raises(TierError) as trouble:
        tier.contains(keys)
    assert str(trouble.value).isprintable(), "keys are no words"
    check_without_the_tier(store)
    cluster.nodes[0].start()
    check_used_again(store, alone)
    store.close()


def test_values_of_a_cluster_lie_on_all_of_its_nodes(cluster: RedisCluster) -> None:
    tier = RedisTier(cluster.url)
    put(tier, *range(64), length=200)
    sizes = [redis.Redis.from_url(node.url).dbsize() for node in cluster.nodes]
    assert sum(sizes) == 64
    assert min(sizes) > 0


@pytest.mark.parametrize("is_cluster", [None, False, True])
def test_a_server_may_come_up_after_its_tier(tmp_path: Path, is_cluster: bool | None) -> None:
    server = Redis(tmp_path)
    tier = RedisTier(server.url, cluster=is_cluster, timeout_s=0.5)
    with pytest.raises(TierError):
        put(tier, 1)
    if not is_cluster:
        with server.running():
            assert put(tier, 1) == [True]
            assert got(tier, 1) == value(1)
    tier.close()


def test_an_address_that_is_none_is_told_so() -> None:
    with pytest.raises(ConfigError, match="tier 'redis': .*redis://"):
        RedisTier("cache.local:6379")


def test_a_server_without_room_refuses_writes_and_is_read(tmp_path: Path) -> None:
    server = Redis(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with server.running():
        tier = RedisTier(server.url)
        with pytest.raises(TierFull, match="maxmemory"):
            put(tier, *range(100), length=100_000)
        found = [got(tier, n, 100_000) for n in range(100)]
        assert None in found
        assert all(blob in (None, value(n, 100_000)) for n, blob in enumerate(found))
        assert found[0]
        tier.close()


def test_a_cluster_without_room_refuses_writes_and_is_read(cluster: RedisCluster) -> None:
    nodes = [redis.Redis.from_url(node.url) for node in cluster.nodes]
    for node in nodes:
        node.config_set("maxmemory", "4mb")
    tier = RedisTier(cluster.url)
    try:
        with pytest.raises(TierFull, match="maxmemory"):
            put(tier, *range(200), length=100_000)
        assert got(tier, 0, 100_000) == value(0, 100_000)
    finally:
        for node in nodes:
            node.config_set("maxmemory", "0")
    tier.close()


def test_a_server_that_hangs_is_left_alone(server: Redis) -> None:
    tier = RedisTier(server.url, timeout_s=0.2)
    store, alone = stores(tier)
    store.save(saved(MemoryTier("4MiB"))[1], payload)
    with server.stopped():
        check_without_the_tier(store)
    check_used_again(store, alone)
    store.close()


def test_clearing_leaves_what_others_keep_in_the_server(server: Redis) -> None:
    others = redis.Redis.from_url(server.url)
    others.set("somebody's", "value")
    others.set("kvweave:settings", "of somebody, too")
    there = RedisTier(server.url, prefix=b"there:")
    here = RedisTier(server.url)
    put(there, 1)
    put(here, 1, 2)
    assert here.clear() == 2
    assert got(there, 1) == value(1)
    assert others.exists("somebody's", "kvweave:settings") == 2


def test_values_may_expire(server: Redis) -> None:
    tier = RedisTier(server.url, ttl_s=1)
    put(tier, 1)
    assert tier.contains([key(1)]).all()
    time.sleep(1.2)
    assert not tier.contains([key(1)]).any()


def test_a_key_of_another_type_costs_its_chunk_and_is_stored_anew(server: Redis) -> None:
    store, prompt = saved(RedisTier(server.url))
    broken = keys_of(prompt, "full", 2)[0]
    client = redis.Redis.from_url(server.url)
    client.delete(b"kvweave:" + broken)
    client.lpush(b"kvweave:" + broken, b"somebody else's")
    assert store.load(store.lookup(prompt), verify) == 512
    assert store.stats().tiers[0].damaged == 1
    assert store.save(prompt, payload, points=[512, 1024]).stored == 1
    assert store.load(store.lookup(prompt), verify) == 1024
    client.close()
    store.close()
