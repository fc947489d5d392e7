"""A socket to the daemon: sends requests and receives replies by request id. Every wait has a deadline.

A reply that comes after its deadline is dropped by its id. After any exception other than `ServerTimeout` half a
message may have been sent or received: the caller must close the channel.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvweave.errors import BadRequest, ServerError, ServerTimeout
from kvweave.server import protocol
from kvweave.server.framing import FrameBuffer
from kvweave.server.heartbeat import BEAT_S, HeartbeatReader
from kvweave.server.protocol import ERRORS, ID_BYTES, Message, Reply, frame, read_request_id

DESCRIPTORS = 3
"""File descriptors that come with `Welcome`: the arena, the heartbeat, and an inbox where there are inboxes."""


class Handshake(NamedTuple):
    """The daemon's first reply, and the file descriptors it passed, which the caller must close."""

    welcome: protocol.Welcome
    descriptors: list[int]


class Channel:
    """A connected socket. Used by one thread at a time; `until` is of `time.monotonic`."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._frames = FrameBuffer()
        self._ids = itertools.count(1)
        self.heartbeat = HeartbeatReader()
        self.is_closed = False

    @property
    def is_local(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    def greet(self, hello: protocol.Hello, until: float) -> Handshake:
        """The first exchange, which has no request id."""
        descriptors: list[int] = []
        try:
            self._send(frame(hello), until)
            if hello.arena:
                self._socket.settimeout(_left(until))
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, DESCRIPTORS)
                self._frames.add(data)
            reply: Reply = protocol.read_reply(self._message(until))
            if isinstance(reply, protocol.Failed):
                raise ERRORS.get(reply.error, ServerError)(reply.message)
            if not isinstance(reply, protocol.Welcome) or len(descriptors) != _num_descriptors(hello, reply):
                raise BadRequest("the daemon sent no welcome, or no arena: this is not a kvweave daemon")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return Handshake(reply, descriptors)

    @property
    def is_ended(self) -> bool:
        """Whether either side has closed the connection."""
        ended, descriptor = select.poll(), self._socket.fileno()
        if descriptor < 0:
            return True
        ended.register(descriptor, select.POLLRDHUP)
        return bool(ended.poll(0))

    def check(self) -> None:
        """Raise `ServerTimeout` if the daemon is frozen, `ConnectionError` if it has also closed the connection.

        Changes nothing, so that any thread may call it while another waits for a reply.
        """
        if not self.heartbeat.is_frozen:
            return
        if self.is_ended:
            raise ConnectionResetError("the daemon closed the connection")
        raise ServerTimeout(f"the daemon is frozen: no sign of life for {self.heartbeat.silent_s:.1f} s")

    def send(self, messages: Sequence[Message], until: float) -> list[int]:
        """Send requests; returns their ids."""
        request_ids = [next(self._ids) & 0xFFFFFFFF or next(self._ids) & 0xFFFFFFFF for _ in messages]
        self._send(b"".join(map(frame, messages, request_ids)), until)
        return request_ids

    def receive(self, request_ids: Sequence[int], until: float) -> list[Reply]:
        """The replies to these requests, which must be the last ones sent. Replies to earlier ones are dropped."""
        replies: list[Reply] = []
        while len(replies) < len(request_ids):
            body = self._message(until)
            request_id = read_request_id(body)
            if request_id not in (request_ids[len(replies)], 0):
                continue
            reply: Reply = protocol.read_reply(memoryview(body)[ID_BYTES:])
            if not request_id:  # the daemon refused a message as too long before it read the id
                raise ServerError(reply.message if isinstance(reply, protocol.Failed) else "a reply without a request")
            replies.append(reply)
        return replies

    # ---- bytes

    def _send(self, data: bytes, until: float) -> None:
        try:
            self._socket.settimeout(_left(until))
            self._socket.sendall(data)
        except TimeoutError:
            self.close()  # part of the message may have been sent
            raise ServerTimeout("the daemon did not read the request in time") from None

    def _message(self, until: float) -> bytes:
        """The next message. After a timeout the bytes of half a message stay in the buffer."""
        while (message := self._frames.next()) is None:
            self._receive(until)
        return message

    def _receive(self, until: float) -> None:
        """Wait for more bytes, waking every `BEAT_S` to see whether the daemon is frozen."""
        if time.monotonic() >= until:
            raise ServerTimeout("the daemon did not answer in time")
        self._socket.settimeout(min(_left(until), BEAT_S))
        try:
            received = self._socket.recv(1 << 16)
        except TimeoutError:
            self.check()
            return
        if not received:
            raise ConnectionResetError("the daemon closed the connection")
        self._frames.add(received)

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()


def _num_descriptors(hello: protocol.Hello, welcome: protocol.Welcome) -> int:
    return (DESCRIPTORS if welcome.inbox_bytes else DESCRIPTORS - 1) if hello.arena else 0


def _left(until: float) -> float:
    """Seconds for a socket's timeout; 0 would make the socket non-blocking."""
    return max(0.0005, until - time.monotonic())
