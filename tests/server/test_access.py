"""Who may talk to a daemon: the Unix socket's permissions, tokens and TLS over TCP, and one daemon a socket."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.errors import BadRequest, Busy, ConfigError, Refused, ServerGone
from kvweave.server import Client, Daemon, protocol
from tests.server.models import POINTS, prompt, serving, settings, store
from tests.store.models import truth


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("open sesame\n")
    return path


@pytest.fixture
def remote(tmp_path: Path, token: Path) -> Iterator[Daemon]:
    with serving(settings(tmp_path, listen="127.0.0.1:0", token_file=token)) as daemon:
        yield daemon


def test_the_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        assert oct((tmp_path / "kv.sock").stat().st_mode)[-3:] == "600"


def test_a_group_may_be_let_in(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a socket to a group here")
    with serving(settings(tmp_path, group="daemon")):
        assert oct((tmp_path / "kv.sock").stat().st_mode)[-3:] == "660"
        assert (tmp_path / "kv.sock").group() == "daemon"


def test_an_unknown_group_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no group 'nobodys'"), serving(settings(tmp_path, group="nobodys")):
        pass


def test_a_socket_whose_path_is_too_long_is_refused_with_the_numbers(tmp_path: Path) -> None:
    wish = settings(tmp_path / ("x" * 120))
    words = f"{len(bytes(wish.socket))} bytes, 107 at most"
    with pytest.raises(ConfigError, match=words), serving(wish):
        pass
    assert not wish.socket.parent.exists()


def test_another_user_is_refused_even_if_the_socket_lets_it_in() -> None:
    if os.getuid():
        pytest.skip("only root can be another user here")
    with tempfile.TemporaryDirectory() as name, serving(settings(Path(name))):
        Path(name).chmod(0o755)
        (Path(name) / "kv.sock").chmod(0o666)
        child = os.fork()
        if not child:
            os.setuid(65534)
            try:
                Client(Path(name) / "kv.sock", arena=False)
            except Refused:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_tcp_needs_the_token(remote: Daemon) -> None:
    address = f"127.0.0.1:{remote.ports[0]}"
    for wrong in ("", "open sesam", "open sesame!", "ö"):
        with pytest.raises(Refused, match="wrong token"):
            Client(address, token=wrong)
    with Client(address, token="open sesame") as client:
        assert client.ask(protocol.StatsRequest(), protocol.StatsReply).report.clients[0].name == ""
        assert client.ask(protocol.Ping(), protocol.Done) == protocol.Done()


def test_the_arena_is_not_for_tcp(remote: Daemon) -> None:
    saver = store(remote.settings.socket)
    saver.save(prompt(), truth, points=POINTS)
    saver.close()
    with Client(f"127.0.0.1:{remote.ports[0]}", token="open sesame") as client:
        assert client.arena.nbytes == 0
        with pytest.raises(BadRequest, match="only over the Unix socket"):
            client.ask(protocol.Lookup(1, 1), protocol.Found)


def test_tcp_without_a_token_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --token-file"):
        settings(tmp_path, listen="127.0.0.1:0")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty"):
        Daemon(settings(tmp_path, listen="127.0.0.1:0", token_file=tmp_path / "empty"))


@pytest.mark.parametrize(("listen", "name"), [("127.0.0.1", "localhost"), ("[::1]", "[::1]")])
def test_tls_if_there_is_a_certificate(tmp_path: Path, token: Path, listen: str, name: str) -> None:
    if listen == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        " -addext subjectAltName=DNS:localhost,IP:::1"
    )
    made = subprocess.run([*command.split(), "-keyout", key, "-out", cert], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    with serving(settings(tmp_path, listen=f"{listen}:0", token_file=token, tls_cert=cert, tls_key=key)) as daemon:
        address = f"{name}:{daemon.ports[0]}"
        trusting = ssl.create_default_context(cafile=str(cert))
        with Client(address, token="open sesame", tls=trusting) as client:
            client.ask(protocol.Ping(), protocol.Done)
        with pytest.raises(ServerGone):
            Client(address, token="open sesame", tls=ssl.create_default_context())
        with pytest.raises(ServerGone):
            Client(address, token="open sesame", timeout_s=1.0)


def test_one_daemon_a_socket_and_a_dead_one_is_in_nobodys_way(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        with pytest.raises(Busy, match=f"served by process {os.getpid()} already"):
            Daemon(settings(tmp_path))
        with Client(tmp_path / "kv.sock") as client:
            client.ask(protocol.Ping(), protocol.Done)
    assert not (tmp_path / "kv.sock").exists()
    (tmp_path / "kv.sock").touch()  # as a killed one leaves it
    with serving(settings(tmp_path)), Client(tmp_path / "kv.sock") as client:
        client.ask(protocol.Ping(), protocol.Done)


def test_a_client_cannot_shorten_the_arena_under_the_others(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        copy = os.dup(daemon.state.arena.fd)
        with pytest.raises(PermissionError):
            os.ftruncate(copy, 0)
        os.close(copy)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
