"""The object tier keeps its contract over a local folder, in memory, and against a real server that speaks S3."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.errors import TierError, TierFull
from kvweave.store import MemoryTier, Store, Tier, TierPolicy, TierStack
from kvweave.store.tier_stack import Budget
from tests.store.contract import KeepingContract, TierContract, got, key, put, value
from tests.store.faults import SCHEMA, FaultContract, payload, saved, verify
from tests.store.servers import S3, wait_until

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvweave[object]'")

from kvweave.store.object_tier import ObjectTier  # noqa: E402
from kvweave.store.tier import whole  # noqa: E402


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
    assert other.put([key(1)], [whole(b"other")]) == [True]
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
        policy = TierPolicy(deadline_s=0.5, cool_s=0.1, retries=1)
        store = Store(SCHEMA, TierStack((MemoryTier("4MiB"), TierPolicy(inline=True)), (tier, policy)))
        alone = Store(SCHEMA, TierStack((tier, TierPolicy(inline=True))))
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


class Bucket(ThreadingHTTPServer):
    """Whatever is asked of it, it says the same: a status and an error, or nothing at all."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(("127.0.0.1", 0), Saying)
        self.status, self.said = status, f"<Error><Code>{code}</Code></Error>".encode()
        self.asked, self.going = 0, threading.Event()

    @property
    def options(self) -> dict[str, Any]:
        account = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
        place = {"endpoint": f"http://127.0.0.1:{self.server_port}", "client_options": {"allow_http": True}}
        return {**account, **place, "retry_config": {"max_retries": 0}}


class Saying(BaseHTTPRequestHandler):
    server: Bucket

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked += 1
        if not self.server.status:
            self.server.going.wait(30)
            return
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.said)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.server.said)

    do_GET = do_HEAD = do_PUT  # noqa: N815 - as http.server calls them

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def bucket(status: int, code: str = "") -> Iterator[Bucket]:
    server = Bucket(status, code)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.going.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (507, "XMinioStorageFull"), (507, "Other")])
def test_a_bucket_without_room_is_full_and_what_was_to_be_saved_is_counted_as_dropped(status: int, code: str) -> None:
    with bucket(status, code) as server:
        tier = ObjectTier("s3://bucket/kv", **server.options)
        with pytest.raises(TierFull):
            put(tier, 1)
        server.asked = 0
        tier_stack = TierStack((tier, TierPolicy(inline=True)))
        assert not tier_stack.put([key(1)], [whole(b"blob")], Budget.of(None)).any()
        assert server.asked == 1  # a full one is not asked again
        assert tier_stack.stats()[0].failed == 1
        assert code in tier_stack.stats()[0].last_error or "507" in tier_stack.stats()[0].last_error
        tier_stack.close()


def test_a_bucket_that_fails_is_asked_again_and_then_left_alone() -> None:
    with bucket(503, "SlowDown") as server:
        tier = ObjectTier("s3://bucket/kv", **server.options)
        store = Store(SCHEMA, TierStack((tier, TierPolicy(inline=True, retries=1, failures=2, backoff_s=0.001))))
        prompt = saved(MemoryTier("4MiB"))[1]
        for _ in range(4):
            assert store.lookup(prompt).position == 0
        stats = store.stats().tiers[0]
        assert (stats.failed, stats.skipped, stats.open) == (2, 2, True)
        assert stats.retried in (1, 2), "a slow first try leaves no time for a second"
        store.close()


def test_a_bucket_that_never_answers_costs_a_request_its_deadline_and_no_more() -> None:
    with bucket(0) as server:
        tier = ObjectTier("s3://bucket/kv", **server.options)
        policy = TierPolicy(deadline_s=0.3, failures=2, cool_s=60)
        store = Store(SCHEMA, TierStack((MemoryTier("4MiB"), TierPolicy(inline=True)), (tier, policy)))
        prompt = saved(MemoryTier("4MiB"))[1]
        began = time.monotonic()
        assert store.save(prompt, payload).dropped == 0  # memory has it
        for _ in range(4):
            assert store.load(store.lookup(prompt), verify) == 1024
        assert time.monotonic() - began < 3
        assert store.stats().tiers[1].late >= 2
        assert store.stats().tiers[1].open
        server.going.set()
        store.close(5)


def test_a_folder_on_a_full_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = ObjectTier(f"file://{tmp_path}")
    put(tier, 1)

    def no_room(*_: object, **__: object) -> None:
        raise obstore.exceptions.GenericError(
            "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)"
        )

    monkeypatch.setattr(obstore, "put", no_room)
    with pytest.raises(TierFull, match="No space left"):
        put(tier, 2)
    assert got(tier, 1) == value(1)


def test_an_object_of_another_size_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's object of many gigabytes at a blob's path would fill the memory."""

    class Found:
        meta = {"size": 1 << 40}

        def bytes(self) -> bytes:
            raise AssertionError("fetched")

    tier = ObjectTier(f"file://{tmp_path}")
    monkeypatch.setattr(obstore, "get", lambda *_: Found())
    assert tier.get([key(1)], [np.empty(100, np.uint8)]) == [1 << 40]


def test_many_objects_are_deleted_in_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, asked, delete = ObjectTier(f"file://{tmp_path}"), list[int](), obstore.delete

    def counted(store: Any, paths: Any) -> None:
        asked.append(1 if isinstance(paths, str) else len(paths))
        delete(store, paths)

    monkeypatch.setattr(obstore, "delete", counted)
    put(tier, *range(100), length=200)
    assert tier.delete([key(n) for n in range(50)]) == 50
    assert tier.clear() == 50
    assert asked == [50, 50]


def test_objects_that_somebody_else_deletes_meanwhile_are_not_counted_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = ObjectTier(f"file://{tmp_path}")
    put(tier, *range(20), length=200)
    contains = tier.contains

    def slow(keys: Sequence[bytes]) -> Any:
        found = contains(keys)
        monkeypatch.undo()
        assert ObjectTier(f"file://{tmp_path}").delete([key(7)]) == 1
        return found

    monkeypatch.setattr(tier, "contains", slow)
    assert 0 < tier.delete([key(n) for n in range(20)]) <= 19
    assert not tier.contains([key(n) for n in range(20)]).any()


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
