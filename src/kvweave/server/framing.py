"""Framing: messages from a stream of bytes; the check of the first message; and a limit on their rate."""

from __future__ import annotations

import time

import msgspec

from kvweave.errors import BadRequest, OverLimit, Refused
from kvweave.server import protocol
from kvweave.server.protocol import DIGEST, LENGTH_BYTES, MESSAGE_BYTES, VERSION

EVERY = 64
"""The rate is checked after this many requests."""


class FrameBuffer:
    """Collects bytes and returns complete messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def num_bytes(self) -> int:
        return len(self._buffer)

    def add(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next complete message; None if there is none yet. Raises `OverLimit` as soon as the length says that
        it is too long."""
        if len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
        if length > MESSAGE_BYTES:
            raise OverLimit(f"a message of {length} bytes, {MESSAGE_BYTES} at most")
        end = LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return message


class RateLimiter:
    """Limits the requests of a connection to `per_s` a second."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._count, self._since = per_s, 0, time.monotonic()

    def rest_s(self) -> float:
        """Count one request; returns how many seconds to pause."""
        self._count += 1
        if self._count % EVERY:
            return 0.0
        took, least = time.monotonic() - self._since, self._count / self._per_s
        if took > 1.0:
            self._count, self._since = 0, time.monotonic()
        return max(0.0, least - took)


def read_hello(message: bytes) -> protocol.Hello:
    """The first message; of another protocol version only the first field is read."""
    try:
        parts = msgspec.msgpack.decode(message)
        name, version = parts[0], parts[1]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, LookupError):
        raise BadRequest("not a kvweave message; the first one is Hello") from None
    if name != "hello":
        raise BadRequest("the first message is Hello")
    if version != VERSION:
        raise Refused(f"the client speaks version {version!r} of the protocol, the daemon {VERSION}; upgrade one")
    try:
        hello = msgspec.convert(parts, protocol.Hello, strict=True)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"a damaged Hello: {error}") from None
    if hello.digest != DIGEST:
        raise Refused("the client's messages have another shape than the daemon's; install the same kvweave for both")
    return hello
