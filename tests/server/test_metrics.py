"""Metrics and health, as Prometheus and a load balancer ask for them."""

from __future__ import annotations

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.server import Daemon, Disk
from kvweave.server.observations import TENANTS, Observations
from kvweave.server.report import TenantReport
from kvweave.store import Quota
from kvweave.store.blob import blob_bytes
from kvweave.store.histogram import BUCKETS_S
from kvweave.store.keys import tenant_id
from tests.server.models import POINTS, SCHEMA, prompt, serving, settings, store, verify
from tests.store.models import truth

LINE = re.compile(r'kvweave_[a-z_]+(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? -?[0-9.e+-]+')


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with serving(settings(tmp_path, http="127.0.0.1:0")) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        client.load(client.lookup(prompt()), verify)
        client.close()
        yield daemon


def get(daemon: Daemon, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{daemon.ports[0]}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_are_in_the_text_format(daemon: Daemon) -> None:
    status, text = get(daemon, "/metrics")
    assert status == 200
    lines = text.splitlines()
    assert all(line.startswith("#") or LINE.fullmatch(line) for line in lines)
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len({*families}) > 25
    assert 'kvweave_tokens_found_total{model="hybrid"' in text
    assert re.search(r'kvweave_tier_used_bytes\{tier="memory"\} [1-9]', text)


def test_histograms_are_cumulative_and_count_what_was_done(daemon: Daemon) -> None:
    text = get(daemon, "/metrics")[1]
    for kind in ("lookup", "load", "save"):
        counts = [int(count) for count in re.findall(rf'kvweave_{kind}_seconds_bucket{{le="[^"]+"}} (\d+)', text)]
        assert len(counts) == len(BUCKETS_S) + 1
        assert counts == sorted(counts)
        assert counts[-1] == int(re.findall(rf"kvweave_{kind}_seconds_count (\d+)", text)[0]) == 1
        assert float(re.findall(rf"kvweave_{kind}_seconds_sum (\S+)", text)[0]) > 0
    assert "# TYPE kvweave_lookup_seconds histogram" in text


def test_bytes_are_counted_by_tier_and_direction(tmp_path: Path) -> None:
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))) as daemon:
        client = store(tmp_path / "kv.sock")
        stored = client.save(prompt(), truth, points=[1024]).stored
        assert client.flush()
        daemon.state.arena.delete(prompt().keys(SCHEMA.ids))
        assert client.load(client.lookup(prompt()), verify) == 1024
        memory, disk = daemon.report().tiers
        size = sum(blob_bytes(SCHEMA.shards[shard]) for shard, _ in client._to_keep(prompt(), truth, [1024], None, 0))
        assert (disk.written_bytes, disk.read_bytes) == (size, size)
        assert (memory.written_bytes, memory.read_bytes) == (size, size)
        assert (disk.stored, disk.hits) == (stored, stored)
        client.close()


def test_tenants_are_counted_by_name_and_beyond_a_bound_together() -> None:
    observed = Observations({"known": Quota()})
    for number in range(100):
        observed.asked(tenant_id("known" if number == 0 else str(number)), {"lookups": 1, "tokens_asked": 10})
    tenants = observed.tenants()
    assert tenants[0] == TenantReport("known", 1, 10, 0)
    assert len(tenants) == TENANTS + 1
    assert tenants[-1] == TenantReport("others", 100 - TENANTS, 10 * (100 - TENANTS), 0)


def test_a_tenant_with_a_quota_is_counted_by_name_however_many_came_before() -> None:
    observed = Observations({"known": Quota()})
    for number in range(100):
        observed.asked(tenant_id(str(number)), {"lookups": 1, "tokens_asked": 10})
    observed.asked(tenant_id("known"), {"lookups": 1, "tokens_asked": 7})
    assert observed.tenants()[-1] == TenantReport("known", 1, 7, 0)


def test_the_slowest_are_kept_and_the_old_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = Observations({})
    for number in range(100):
        observed.took("load", number / 100, "client", number)
    assert [slow.num_tokens for slow in observed.slowest()] == [*range(99, 79, -1)]
    later = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert observed.slowest() == ()
    observed.took("save", 0.001, "client", 7)
    assert [slow.kind for slow in observed.slowest()] == ["save"]


def test_health_and_other_pages(daemon: Daemon) -> None:
    assert get(daemon, "/health") == (200, "ok\n")
    assert get(daemon, "/metrics?x=1")[0] == 200
    assert get(daemon, "/health", "HEAD") == (200, "")
    assert get(daemon, "/nothing")[0] == 404
    assert get(daemon, "/health", "POST")[0] == 405


@pytest.mark.parametrize("data", [b"\r\n\r\n", b"\x16\x03\x01 tls\n\n", b"GET /\r\n\r\n", b"x" * 20_000])
def test_what_is_no_http_is_told_so(daemon: Daemon, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", daemon.ports[0]), 5) as raw:
        raw.sendall(data)
        assert raw.recv(100).split()[1] in (b"400", b"431")
    assert get(daemon, "/health")[0] == 200
