"""The Redis tier keeps its contract against a real server, which is killed and comes back."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.errors import TierError, TierFull
from kvweave.store import Cascade, LanePolicy, MemoryTier, Store, Tier
from tests.store.contract import TierContract, got, key, put, value
from tests.store.faults import SCHEMA, FaultContract, payload, saved, verify

pytestmark = pytest.mark.slow
pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvweave[redis]'")

from kvweave.store.redis import RedisTier  # noqa: E402


class Server:
    """A redis-server of our own, on a Unix socket, without persistence."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._binary = shutil.which("redis-server")
        if self._binary is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        self._socket, self._options = directory / "redis.sock", options
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        assert self._binary
        command = [self._binary, "--port", "0", "--unixsocket", str(self._socket), "--save", "", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self._socket)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


class TestRedis(TierContract, FaultContract):
    @pytest.fixture
    def tier(self, server: Server) -> Iterator[Tier]:
        tier = RedisTier(server.url)
        yield tier
        tier.close()


def test_a_server_that_is_killed_and_comes_back_is_used_again(server: Server) -> None:
    tier = RedisTier(server.url, timeout_s=0.5)
    policy = LanePolicy(deadline_s=0.5, cool_s=0.1, retries=1)
    store = Store(SCHEMA, Cascade((MemoryTier("4MiB"), LanePolicy(inline=True)), (tier, policy)))
    prompt = saved(MemoryTier("4MiB"))[1]
    store.save(prompt, payload)
    server.kill()
    with pytest.raises(TierError):
        tier.contains([key(1)])
    for _ in range(6):
        began = time.monotonic()
        assert store.load(store.lookup(prompt), verify) == 1024
        assert time.monotonic() - began < 2
    assert store.stats().tiers[1].open
    server.start()
    time.sleep(0.15)
    store.save(prompt, payload)  # the near tier has it; the server that came back empty gets it again
    time.sleep(0.15)
    store.save(prompt, payload)
    assert not store.stats().tiers[1].open
    fresh = Store(SCHEMA, Cascade(tier))
    assert fresh.load(fresh.lookup(prompt), verify) == 1024
    store.close()


def test_a_server_without_room_refuses_writes_and_is_read(tmp_path: Path) -> None:
    server = Server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    server.start()
    tier = RedisTier(server.url)
    with pytest.raises(TierFull, match="maxmemory"):
        put(tier, *range(100), length=100_000)
    assert got(tier, 0, 100_000) == value(0, 100_000)
    tier.close()
    server.kill()


def test_values_may_expire(server: Server) -> None:
    tier = RedisTier(server.url, ttl_s=1)
    put(tier, 1)
    assert tier.contains([key(1)]).all()
    time.sleep(1.2)
    assert not tier.contains([key(1)]).any()
