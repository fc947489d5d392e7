"""Who is at the other end: a client does not believe a stranger's daemon, nor a daemon a link in its place."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.errors import ConfigError, Refused
from kvweave.server import Client, Daemon, Settings, default_socket
from kvweave.server.peer import check_server, credentials
from kvweave.server.run import run
from tests.server.models import prompt, serving, settings, store

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@contextmanager
def squatting(place: Path) -> Iterator[None]:
    """A daemon of another user's at a path."""
    child = os.fork()
    if not child:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            run(Settings(memory=4 << 20, socket=place))
        finally:
            os._exit(1)
    try:
        until = time.monotonic() + 20
        while not _listens(place) and time.monotonic() < until:
            time.sleep(0.01)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _listens(place: Path) -> bool:
    """Whether somebody does: a socket's file is there a moment earlier."""
    with socket.socket(socket.AF_UNIX) as raw:
        return not raw.connect_ex(str(place))


def theirs(folder: Path) -> Path:
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    for each in (folder, *folder.parents):
        if each != Path("/"):
            each.chmod(each.stat().st_mode | 0o011)  # so that they get there
    return folder


@needs_root
def test_a_strangers_daemon_is_refused_and_is_a_miss(tmp_path: Path) -> None:
    place = theirs(tmp_path / "theirs") / "kv.sock"
    with squatting(place), pytest.raises(Refused, match=r"run by user .*\(65534\), not by you"):
        Client(place)


@needs_root
def test_a_service_in_a_directory_that_only_it_and_root_can_write_to_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = theirs(tmp_path / "service") / "kv.sock"
    with squatting(place):
        monkeypatch.setattr("kvweave.server.peer._only_writable_by", lambda directory, uid: True)
        monkeypatch.setattr("kvweave.server.client.HELLO_S", 30.0)  # on a busy machine it answers late
        Client(place, timeout_s=30.0).close()


def test_a_directory_is_trusted_only_if_nothing_above_it_is_open_to_others(tmp_path: Path) -> None:
    from kvweave.server.peer import _only_writable_by

    mine = os.getuid()
    assert _only_writable_by(Path("/usr/bin"), mine)
    assert not _only_writable_by(Path("/tmp"), mine)
    assert not _only_writable_by(tmp_path, mine)  # below /tmp


def test_a_client_that_knows_its_daemon_asks_the_kernel(tmp_path: Path) -> None:
    with serving(settings(tmp_path)), socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(tmp_path / "kv.sock"))
        assert credentials(raw) == (os.getpid(), os.getuid())
        check_server(raw, tmp_path / "kv.sock")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("do not touch")
    (tmp_path / "kv.sock.lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="symbolic links"):
        Daemon(settings(tmp_path))
    assert precious.read_text() == "do not touch"


@needs_root
def test_a_directory_of_another_users_is_no_place_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to another user"):
        Daemon(Settings(memory=4 << 20, socket=theirs(tmp_path / "theirs") / "kv.sock"))


def test_the_default_socket_is_in_a_directory_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "kvweave.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert default_socket() == Path(f"/tmp/kvweave-{os.getuid()}/kvweave.sock")


def test_a_socket_directory_that_is_made_is_the_users_alone(tmp_path: Path) -> None:
    wish = Settings(memory=4 << 20, socket=tmp_path / "mine" / "kv.sock")
    with serving(wish):
        assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
        client = store(wish.socket)
        assert client.lookup(prompt(0)).position == 0
        client.close()
