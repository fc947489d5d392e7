"""The object tier keeps its contract over a local folder, in memory, and against a real server that speaks S3."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.errors import TierError
from kvweave.store import Cascade, LanePolicy, MemoryTier, Store, Tier
from tests.store.contract import KeepingContract, TierContract, got, key, put, value
from tests.store.faults import SCHEMA, FaultContract, payload, saved, verify
from tests.store.servers import S3, wait_until

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvweave[object]'")

from kvweave.store.objects import ObjectTier  # noqa: E402


class TestFolder(TierContract, KeepingContract, FaultContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return ObjectTier(f"file://{tmp_path}")

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Tier]:
        return lambda: ObjectTier(f"file://{tmp_path}")


class TestMemory(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return ObjectTier(obstore.store.MemoryStore())


@pytest.fixture(scope="module")
def running() -> Iterator[S3]:
    server = S3()
    with server.running():
        yield server


@pytest.fixture
def server(running: S3) -> S3:
    """Empty, whatever earlier tests left there."""
    ObjectTier(running.url, **running.options).clear()
    return running


@pytest.mark.slow
class TestS3(TierContract, KeepingContract, FaultContract):
    @pytest.fixture
    def tier(self, server: S3) -> Tier:
        return ObjectTier(server.url, **server.options)

    @pytest.fixture
    def reopen(self, server: S3) -> Callable[[], Tier]:
        return lambda: ObjectTier(server.url, **server.options)


@pytest.mark.slow
def test_the_first_of_two_that_put_the_same_object_stays_whatever_its_length(server: S3) -> None:
    tier, other = (ObjectTier(server.url, **server.options) for _ in range(2))
    size = 12 << 20  # more than what S3 clients send in one part
    put(tier, 1, length=size)
    assert other.put([key(1)], [[b"other"]]) == [True]
    assert got(other, 1, size) == value(1, size)


@pytest.mark.slow
def test_more_objects_than_a_server_lists_at_once_are_cleared(server: S3) -> None:
    tier = ObjectTier(server.url, **server.options)
    put(tier, *range(1100), length=200)
    obstore.put(tier._store, "notes.txt", b"of somebody")
    obstore.put(tier._store, "ab/cd", b"of somebody, too")
    assert tier.clear() == 1100
    assert sorted(each["path"] for page in obstore.list(tier._store) for each in page) == ["ab/cd", "notes.txt"]
    obstore.delete(tier._store, ["ab/cd", "notes.txt"])


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["killed", "hangs"])
def test_a_server_that_is_in_trouble_and_comes_back_is_used_again(trouble: str) -> None:
    server = S3()
    with server.running():
        tier = ObjectTier(server.url, **server.options | {"client_options": {"allow_http": True, "timeout": "1s"}})
        policy = LanePolicy(deadline_s=0.5, cool_s=0.1, retries=1)
        store = Store(SCHEMA, Cascade((MemoryTier("4MiB"), LanePolicy(inline=True)), (tier, policy)))
        alone = Store(SCHEMA, Cascade((tier, LanePolicy(inline=True))))
        prompt = saved(MemoryTier("4MiB"))[1]
        store.save(prompt, payload)
        assert alone.lookup(prompt).position == 1024

        def loads_without_it() -> None:
            for _ in range(6):
                began = time.monotonic()
                assert store.load(store.lookup(prompt), verify) == 1024
                store.save(prompt, payload)
                assert time.monotonic() - began < 2
            assert store.stats().tiers[1].open

        def is_used_again() -> bool:
            store.save(prompt, payload)
            return alone.lookup(prompt).position == 1024 and not store.stats().tiers[1].open

        if trouble == "hangs":
            with server.stopped():
                loads_without_it()
        else:
            server.kill()
            loads_without_it()
            server.start()
        wait_until(is_used_again, "the tier is used again")
        assert alone.load(alone.lookup(prompt), verify) == 1024
        store.close()


def test_tenants_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    tier = ObjectTier(f"file://{tmp_path}")
    put(tier, 7)
    path = next(path for path in tmp_path.rglob("*") if path.is_file())
    assert path.relative_to(tmp_path).parts == (key(7)[:8].hex(), key(7)[8:40].hex(), key(7)[40:].hex())


def test_a_bucket_that_is_not_there_is_a_tier_error() -> None:
    account = {"access_key_id": "a", "secret_access_key": "b", "region": "x", "endpoint": "http://127.0.0.1:9"}
    options: dict[str, Any] = {"retry_config": {"max_retries": 0}, "client_options": {"allow_http": True}}
    tier = ObjectTier("s3://nobody/here", **account, **options)
    with pytest.raises(TierError):
        tier.contains([key(1)])
