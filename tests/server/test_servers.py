"""Real servers behind a daemon: what one client stored is there after a restart, whatever happened to the server."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvweave.server import RemoteStore, protocol
from kvweave.store.keys import tenant_id
from tests.server.models import POINTS, prompt, spawned, store, verify
from tests.store.models import truth
from tests.store.servers import S3, Redis, RedisCluster, wait_until

pytestmark = pytest.mark.slow


class BackingTiers:
    """A server, how a daemon is told of it, and how it goes and comes."""

    def __init__(self, server: Redis | S3, options: tuple[str, str], **environment: str) -> None:
        self.server, self.options, self.environment = server, options, environment
        self.name = options[0].removeprefix("--")


@contextmanager
def redis(folder: Path) -> Iterator[BackingTiers]:
    pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvweave[redis]'")
    server = Redis(folder, "--appendonly", "yes")
    with server.running():
        yield BackingTiers(server, ("--redis", server.url))


@contextmanager
def redis_cluster(folder: Path) -> Iterator[BackingTiers]:
    pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvweave[redis]'")
    cluster = RedisCluster(folder, "--appendonly", "yes")
    with cluster.running():
        yield BackingTiers(cluster.nodes[0], ("--redis", cluster.url))


@contextmanager
def s3(folder: Path) -> Iterator[BackingTiers]:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvweave[object]'")
    server = S3()
    with server.running():
        yield BackingTiers(server, ("--object", server.url), **server.environment)


@pytest.fixture(params=[redis, redis_cluster, s3], ids=["redis", "cluster", "s3"])
def backing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BackingTiers]:
    with request.param(tmp_path) as backing:
        yield backing


@contextmanager
def serving(backing: BackingTiers, folder: Path) -> Iterator[tuple[Any, RemoteStore]]:
    options = ("--memory", "32MiB", *backing.options)
    with spawned(folder / "kv.sock", *options, **backing.environment) as process:
        client = store(folder / "kv.sock")
        yield process, client
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_what_was_stored_is_there_after_the_daemons_restart(backing: BackingTiers, tmp_path: Path) -> None:
    with serving(backing, tmp_path) as (_, client):
        for number in range(3):
            assert client.save(prompt(number), truth, points=POINTS).dropped == 0
    with serving(backing, tmp_path) as (process, client):
        for number in range(3):
            assert client.load(client.lookup(prompt(number)), verify) == 1024
        assert client.report().tiers[1].hits > 0
        client.flush()
        process.kill()  # nothing is left to be written: nothing is lost
        process.wait()
        with serving(backing, tmp_path) as (_, again):
            assert again.load(again.lookup(prompt(0)), verify) == 1024
        process.returncode = 0


def test_a_daemon_goes_on_without_its_server_and_uses_it_again(backing: BackingTiers, tmp_path: Path) -> None:
    with serving(backing, tmp_path) as (_, client):
        client.save(prompt(0), truth, points=POINTS)
        assert client.flush()
        backing.server.kill()
        for number in range(1, 5):
            client.save(prompt(number), truth, points=POINTS)
            assert client.load(client.lookup(prompt(number)), verify) == 1024
            assert client.lookup(prompt(100 + number)).position == 0
        assert client.report().tiers[1].last_error
        backing.server.start()

        fresh = iter(range(1000, 2000))

        def is_used_again() -> bool:
            time.sleep(0.5)
            client.lookup(prompt(100))
            client.save(prompt(next(fresh)), truth, points=POINTS)
            client.flush()
            return not client.report().tiers[1].open

        wait_until(is_used_again, "the server is asked and written again")
    with serving(backing, tmp_path) as (_, client):  # the stop wrote what the server had missed
        for number in range(5):
            assert client.load(client.lookup(prompt(number)), verify) == 1024


def test_a_daemon_starts_while_its_server_is_down(backing: BackingTiers, tmp_path: Path) -> None:
    backing.server.kill()
    with serving(backing, tmp_path) as (_, client):
        client.save(prompt(), truth, points=POINTS)
        assert client.load(client.lookup(prompt()), verify) == 1024
        backing.server.start()


def test_clearing_reaches_the_server(backing: BackingTiers, tmp_path: Path) -> None:
    with serving(backing, tmp_path) as (_, client):
        for tenant in ("a", "b"):
            client.save(prompt(tenant=tenant), truth, points=POINTS)
        cleared = client.client.ask(protocol.Clear(tenant_id("a")), protocol.ClearReply)
        assert [tier.name for tier in cleared.tiers] == ["memory", backing.name]
        assert cleared.tiers[0].entries == cleared.tiers[1].entries > 0
        assert not cleared.kept_by
        assert client.lookup(prompt(tenant="a")).position == 0
        assert client.load(client.lookup(prompt(tenant="b")), verify) == 1024
        client.client.ask(protocol.Clear(model="hybrid"), protocol.ClearReply)
        assert client.lookup(prompt(tenant="b")).position == 0
    with serving(backing, tmp_path) as (_, client):
        assert client.lookup(prompt(tenant="a")).position == 0


def test_a_server_that_is_down_keeps_what_it_has_and_the_answer_says_so(backing: BackingTiers, tmp_path: Path) -> None:
    with serving(backing, tmp_path) as (_, client):
        client.save(prompt(), truth, points=POINTS)
        client.flush()
        backing.server.kill()
        cleared = client.client.ask(protocol.Clear(wait_s=20.0), protocol.ClearReply, 30.0)
        assert cleared.tiers[0].entries > 0
        assert [*cleared.kept_by] == [backing.name]
        assert cleared.kept_by[backing.name]
        backing.server.start()
