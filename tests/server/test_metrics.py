"""Metrics and health, as Prometheus and a load balancer ask for them."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.server import Daemon
from tests.server.models import POINTS, prompt, serving, settings, store, verify
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
