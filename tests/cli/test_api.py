"""`kvweave api` as a process: it answers, and a signal ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.cli.command import Kvweave

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def ask(url: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    found: dict[str, object] = json.load(urllib.request.urlopen(urllib.request.Request(url, data), timeout=30))
    return found


def test_a_port_that_is_in_use_is_an_error_before_the_model_is_loaded(kvweave: Kvweave) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = kvweave("api", "/no/such/model", "--port", str(port))
    assert run.code == 2
    assert f"cannot listen on 127.0.0.1, port {port}: " in run.err


@pytest.mark.slow
def test_a_model_is_served_until_a_signal() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "kvweave",
        "api",
        "gemma-3-27b",
        "--size",
        "2M",
        "--memory",
        "64MiB",
        "--port",
        port,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as served:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                assert ask(f"{url}/health") == {"status": "ok"}
                break
            except urllib.error.URLError:
                assert time.monotonic() < until
                time.sleep(0.2)
        answer = ask(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 3, "temperature": 0})
        assert answer["usage"]["completion_tokens"] == 3  # type: ignore[index]
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) in (0, -signal.SIGTERM)
