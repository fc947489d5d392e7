"""The Redis tier keeps its contract against a real server and a real cluster, which are killed and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.errors import ConfigError, TierError, TierFull
from kvweave.store import Cascade, LanePolicy, MemoryTier, Store, Tier
from tests.store.contract import KeepingContract, TierContract, got, key, put, value
from tests.store.faults import SCHEMA, FaultContract, payload, saved, verify
from tests.store.servers import Redis, RedisCluster, wait_until

pytestmark = pytest.mark.slow
redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvweave[redis]'")

from kvweave.store.redis import RedisTier  # noqa: E402


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


def stores(tier: RedisTier) -> tuple[Store, Store]:
    """One with memory before the tier, and one with the tier alone."""
    policy = LanePolicy(deadline_s=0.5, cool_s=0.1, retries=1)
    near = Store(SCHEMA, Cascade((MemoryTier("4MiB"), LanePolicy(inline=True)), (tier, policy)))
    return near, Store(SCHEMA, Cascade((tier, LanePolicy(inline=True))))


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
        assert got(tier, 0, 100_000) == value(0, 100_000)
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
