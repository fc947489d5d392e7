"""`kvweave serve`: a process that starts, stops as asked, and says what is wrong in one line."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.cli.command import Kvweave
from tests.server.models import POINTS, prompt, spawned, store, verify
from tests.store.models import truth

WRONG = {
    "no size": (("--memory", "lots"), "cannot read 'lots' as a size"),
    "a disk of no size": (("--disk", "/tmp/kv:10XB"), "cannot read '10XB' as a size"),
    "tcp without a token": (("--listen", "127.0.0.1:0"), "needs --token-file"),
    "no config": (("--config", "nowhere.toml"), "cannot open nowhere.toml"),
    "half of tls": (("--tls-key", "key.pem"), "go together"),
    "a lease of nothing": (("--lease", "0"), "a lease of 0 s: more than 0 and at most 3600 s"),
    "a drain without an end": (("--drain", "inf"), "inf s to drain: 0 to 86400 s"),
    "a disk of less than nothing": (("--disk", "/tmp/kv:-5"), "cannot read '-5' as a size"),
    "an inbox of a byte": (("--inbox", "1"), "an inbox of 1 bytes holds no chunk of a model; 1048576 bytes at least"),
    "an address of two ports": (("--http", "127.0.0.1:1:2"), "one colon, or [IPV6]:PORT, not '127.0.0.1:1:2'"),
    "no number": (("--lease", "soon"), "Invalid value for '--lease'"),
    "no redis": (("--memory", "1MiB", "--redis", "cache.local:6379"), "must specify one of the following schemes"),
    "no object store": (("--memory", "1MiB", "--object", "bucket"), "expected for example s3://bucket/prefix"),
    "no token": (("--listen", "127.0.0.1:0", "--token-file", "nowhere"), "cannot open nowhere"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(kvweave: Kvweave, tmp_path: Path, what: str) -> None:
    options, words = WRONG[what]
    run = kvweave("serve", "--socket", str(tmp_path / "s"), *options)
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert words in run.err


def test_an_address_that_is_none_is_one_line_too(kvweave: Kvweave, tmp_path: Path) -> None:
    run = kvweave("serve", "--memory", "1MiB", "--socket", str(tmp_path / "s"), "--http", "nonsense")
    assert run.code == 2
    assert run.err.rstrip().endswith("an address is HOST:PORT, for example 127.0.0.1:9400, not 'nonsense'")


def test_a_file_is_not_replaced_by_a_socket(kvweave: Kvweave, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    run = kvweave("serve", "--memory", "1MiB", "--socket", str(tmp_path / "notes"))
    assert run.code == 2
    assert "notes is a file and no socket, and is not replaced by one" in run.err
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_host_that_is_not_this_one_is_named(kvweave: Kvweave, tmp_path: Path) -> None:
    run = kvweave("serve", "--memory", "1MiB", "--socket", str(tmp_path / "s"), "--http", "192.0.2.1:9")
    assert run.code == 2
    assert "cannot listen at 192.0.2.1:9: " in run.err


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_used_is_named(kvweave: Kvweave, tmp_path: Path, content: str | None) -> None:
    token, cert = tmp_path / "token", tmp_path / "cert.pem"
    token.write_text("sesame")
    if content is not None:
        cert.write_text(content)
    listen = ("--listen", "127.0.0.1:0", "--token-file", str(token), "--tls-cert", str(cert), "--tls-key", str(cert))
    run = kvweave("serve", "--memory", "1MiB", "--socket", str(tmp_path / "s"), *listen)
    assert run.code == 2
    assert f"--tls-cert {cert} with --tls-key {cert} cannot be used: " in run.err


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_drains_and_a_restart_is_warm(tmp_path: Path, how: signal.Signals) -> None:
    path, options = tmp_path / "kv.sock", ("--memory", "8MiB", "--disk", f"{tmp_path}/disk:64MiB")
    with spawned(path, *options) as process:
        client = store(path)
        client.save(prompt(), truth, points=POINTS)
        process.send_signal(how)
        assert process.wait(20) == 0
        assert process.stderr
        log = process.stderr.read().splitlines()
        assert [line.split(" INFO ")[1].split(" after")[0] for line in log] == [
            f"serving 8.00 MiB at {path}", "tier disk: 0 entries", f"{how.name}: stopping", "drained", "stopped",
        ]  # fmt: skip
        assert not path.exists()
    with spawned(path, *options):
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_a_second_daemon_is_told_who_is_the_first(kvweave: Kvweave, tmp_path: Path) -> None:
    with spawned(tmp_path / "kv.sock", "--memory", "1MiB") as process:
        run = kvweave("serve", "--memory", "1MiB", "--socket", str(tmp_path / "kv.sock"))
        assert run.code == 2
        assert f"served by process {process.pid} already" in run.err


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        with spawned(tmp_path / "kv.sock", "--memory", "1MiB", NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            assert manager.recv(100) == b"READY=1"
            os.kill(process.pid, signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
