"""Who is at the other end of a Unix socket, and whether a client may believe what comes from there."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct
from pathlib import Path

from kvweave.errors import Refused

_CREDENTIALS = struct.Struct("iii")
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def credentials(connected: socket.socket) -> tuple[int, int]:
    """Process and user of the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def check_server(connected: socket.socket, path: Path) -> None:
    """Raises `Refused` where anybody could have put a socket: KV of a stranger would be taken for the model's own.

    Trusted are this user, root, and a user whose socket lies where only root and that user can write: `/run/kvweave`
    of a service, but nothing under `/tmp`.
    """
    _, uid = credentials(connected)
    if uid in (0, os.getuid()) or _only_writable_by(path.resolve().parent, uid):
        return
    raise Refused(
        f"the daemon at {path} is run by user {_name(uid)}, not by you, and others may write to its directory; let the"
        " socket lie where only root and that user can, for example in /run/kvweave"
    )


def _only_writable_by(directory: Path, uid: int) -> bool:
    """Root and this user apart, nobody can write to it, or to what it lies in."""
    try:
        found = [place.stat() for place in (directory, *directory.parents)]
    except OSError:  # what cannot be looked at is not trusted
        return False
    return all(each.st_uid in (0, uid) and not each.st_mode & OTHERS for each in found)


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name!r} ({uid})"
    except KeyError:
        return str(uid)
