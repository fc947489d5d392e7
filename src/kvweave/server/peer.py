"""The peer of a Unix socket, and whether a client may trust it."""

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
    """Process id and user id of the peer, from the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def check_server(connected: socket.socket, path: Path) -> None:
    """Raise `Refused` if another user could have created the socket: KV from a stranger would be used as the model's
    own.

    Trusted are this user, root, and a user whose socket is in a directory that only root and that user can write:
    `/run/kvweave` of a service, but nothing under `/tmp`.
    """
    _, uid = credentials(connected)
    if uid in (0, os.getuid()) or _only_writable_by(path.resolve().parent, uid):
        return
    raise Refused(
        f"the daemon at {path} is run by user {_name(uid)}, not by you, and others may write to its directory; let the"
        " socket lie where only root and that user can, for example in /run/kvweave"
    )


def _only_writable_by(directory: Path, uid: int) -> bool:
    """Whether only root and this user can write to the path and to the directories above it."""
    try:
        found = [place.stat() for place in (directory, *directory.parents)]
    except OSError:  # a directory that cannot be examined is not trusted
        return False
    return all(each.st_uid in (0, uid) and not each.st_mode & OTHERS for each in found)


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name!r} ({uid})"
    except KeyError:
        return str(uid)
