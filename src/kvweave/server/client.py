"""A client of a daemon: requests, replies, and the daemon's arena mapped into memory. Blocking; reconnects by itself.

Every call ends at its deadline, whatever the daemon does. While the daemon is frozen, calls fail at once; they are
served again after its next heartbeat. A forked process makes a connection of its own.
"""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from kvweave.errors import ServerError, ServerGone, ServerTimeout
from kvweave.server import protocol
from kvweave.server.byte_limiter import ByteLimiter
from kvweave.server.channel import Channel, Handshake
from kvweave.server.heartbeat import HeartbeatReader
from kvweave.server.mapping import MappedArena, map_arena, map_inbox, unmapped
from kvweave.server.peer import check_server
from kvweave.server.protocol import DIGEST, ERRORS, VERSION, Message, Reply
from kvweave.store.closeable import Closeable
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes
from kvweave.store.tier_stack import UNLIMITED

A = TypeVar("A", bound=Message)
Requests = Sequence[Message] | Callable[[], Sequence[Message]]
TOLD = 64
"""Messages that wait for the next request, at most; older ones are dropped."""
POST_S = 0.02
"""Seconds that a message which needs no reply waits for its turn, at most."""
HELLO_S = 2.0
"""Seconds that a running daemon takes for its first reply, at most."""


class Exchange(NamedTuple):
    """Replies, and the generation of the connection they came over."""

    replies: list[Reply]
    generation: int


class Client(Closeable):
    """A daemon at `address`: the path of its Unix socket, or `HOST:PORT` (with `token`; without the arena).
    `arena`: whether the arena is mapped.

    Thread-safe; one request is in flight at a time, and waiting for one's turn counts against the deadline. While the
    daemon is gone, calls raise `ServerGone` at once for `cool_s`, then connecting is tried again. Leases and sequences
    are lost with their connection; each connection has another `generation`.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        name: str = "",
        token: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 10.0,
        cool_s: float = 0.5,
        arena: bool = True,
    ) -> None:
        self._address, self._name, self._token, self._tls = address, name, token, tls
        self._timeout_s, self._cool_s, self._with_arena = timeout_s, cool_s, arena
        self._lock, self._numbers = threading.RLock(), itertools.count(1)
        self._channel: Channel | None = None
        self._retry_at, self._is_retired = 0.0, False
        self._to_undo: list[Message] = []
        self._to_tell: deque[Message] = deque(maxlen=TOLD)
        self._mapped = unmapped()
        self._set_limiters()
        register_after_fork(self)
        with self._lock:
            self._connect(time.monotonic() + timeout_s)

    def _set_limiters(self) -> None:
        self.reserving, self.fetching, self.inbox_turn = ByteLimiter(), ByteLimiter(), ByteLimiter()
        """`inbox_turn` is held, by one at a time, while the inbox is written, until the daemon has copied it."""

    # ---- asking

    def ask(self, request: Message, reply: type[A], timeout_s: float | None = None) -> A:
        """The reply to a request; raises the daemon's error."""
        return self.check(self.exchange([request], timeout_s).replies[0], reply)

    def exchange(
        self,
        requests: Requests,
        timeout_s: float | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Exchange:
        """Several requests in one round trip. Errors are returned as `Failed` replies. `meanwhile` is called when they
        are sent, before replies are waited for; it must not ask this client anything.

        `requests` may be a function, which is called when the connection is known: for requests that depend on it. If
        the connection turns out to be closed, a new one is made, once: what was held is lost, and `generation` has
        changed.
        """
        until = time.monotonic() + UNLIMITED.within(self._timeout_s if timeout_s is None else max(0.0, timeout_s))
        try:
            if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
                raise ServerTimeout(f"{self._address}: another thread's request is still in flight")
            fresh = self._channel is None
            channel = self._channel or self._connect(until)
            try:
                return self._asked(channel, requests, until, meanwhile)
            except ConnectionError as error:
                if fresh:
                    self._lose(error)
            try:
                return self._asked(self._connect(until), requests, until, meanwhile)
            except ConnectionError as error:
                self._lose(error)
        finally:
            try:  # noqa: SIM105 - an interrupt may come when it is acquired, or in `suppress` before it is released
                self._lock.release()
            except RuntimeError:  # it was not acquired
                pass

    def _asked(self, channel: Channel, requests: Requests, until: float, meanwhile: Callable[[], object]) -> Exchange:
        made: Sequence[Message] = ()
        try:
            channel.check()
            made = requests() if callable(requests) else requests
            first, self._to_undo = [*self._to_undo, *self._to_tell], []
            self._to_tell.clear()
            request_ids = channel.send([*first, *made], until)[len(first) :]
            meanwhile()
            return Exchange(channel.receive(request_ids, until), self.generation)
        except ServerTimeout:
            self._to_undo += [message for request in made if (message := protocol.undo(request))]
            if channel.is_closed:
                self._hang_up()
            raise
        except (OSError, msgspec.MsgspecError) as error:
            self._hang_up()
            if isinstance(error, ConnectionError):
                raise
            self._lose(error)
        except BaseException:  # requests may have been sent and served: the connection's state is unknown
            self._hang_up()
            raise

    @staticmethod
    def check(reply: Reply, kind: type[A]) -> A:
        """A reply of `exchange`, checked to be of this type; raises the daemon's error."""
        if isinstance(reply, protocol.Failed):
            raise ERRORS.get(reply.error, ServerError)(reply.message)
        if not isinstance(reply, kind):
            raise ServerError(f"{kind.__name__} expected, the daemon answered {type(reply).__name__}")
        return reply

    def tell(self, message: Message) -> None:
        """Send a message along with the next request; its reply is ignored. The last `TOLD` messages are kept."""
        self._to_tell.append(message)

    def post(self, message: Message) -> None:
        """As `tell`, but sent now, unless the requests of other threads take longer than `POST_S`."""
        self.tell(message)
        try:
            if self._lock.acquire(timeout=POST_S) and self._channel:
                self._channel.check()
                told = [*self._to_tell]
                self._to_tell.clear()
                self._channel.send(told, time.monotonic())
        except (OSError, ServerTimeout) as error:
            if isinstance(error, OSError) or (self._channel and self._channel.is_closed):
                self._hang_up()
        except BaseException:  # part of it may have been sent
            self._hang_up()
            raise
        finally:
            try:  # noqa: SIM105 - an interrupt may come when it is acquired, or in `suppress` before it is released
                self._lock.release()
            except RuntimeError:  # it was not acquired
                pass

    def number(self) -> int:
        """A number that this client has not used on any connection."""
        return next(self._numbers)

    def again(self, *, arena: bool, timeout_s: float | None = None) -> Client:
        """Another connection to the same daemon, for `timeout_s` seconds at most."""
        if channel := self._channel:
            # A frozen daemon is an error here, at once, and not after the timeout of a second connection.
            with suppress(ConnectionError):
                channel.check()
        return Client(
            self._address, name=self._name, token=self._token, tls=self._tls, cool_s=self._cool_s,
            arena=arena, timeout_s=self._timeout_s if timeout_s is None else max(0.0, timeout_s),
        )  # fmt: skip

    # ---- connecting

    def refresh(self, timeout_s: float | None = None) -> None:
        """Make a new connection if the daemon has ended this one: the limits of its next start may be others. Without a
        round trip otherwise."""
        if self._channel is None or self._channel.is_ended:
            self.ask(protocol.Ping(), protocol.Done, timeout_s)

    def _connect(self, until: float) -> Channel:
        if self._is_retired:
            raise ServerGone("this connection was closed for good: make a new one")
        if time.monotonic() < self._retry_at:
            raise ServerGone(f"no daemon at {self._address}, as of {self._cool_s} s ago")
        until = min(until, time.monotonic() + HELLO_S)
        try:
            channel = Channel(self._open(max(0.001, until - time.monotonic())))
        except (OSError, UnicodeError) as error:  # also a host that cannot be one
            self._lose(error)
        try:
            self._hello(channel, until)
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError | msgspec.MsgspecError | ServerTimeout):
                self._lose(error)
            raise
        self._channel = channel
        self._to_undo.clear()
        return channel

    def _open(self, timeout_s: float) -> socket.socket:
        host, colon, port = str(self._address).rpartition(":")
        if isinstance(self._address, Path) or not colon or not port.isdecimal() or "/" in host:
            here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                here.settimeout(timeout_s)
                here.connect(str(self._address))
                check_server(here, Path(self._address))
            except BaseException:
                here.close()
                raise
            return here
        host = host.strip("[]")
        there = socket.create_connection((host, int(port)), timeout_s)
        # Requests are small, and each waits for its reply: Nagle's algorithm would only delay them.
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._tls.wrap_socket(there, server_hostname=host) if self._tls else there

    def _hello(self, channel: Channel, until: float) -> None:
        hello = protocol.Hello(VERSION, DIGEST, self._name, self._token, channel.is_local)
        welcomed = channel.greet(hello, until)
        mapped = self._mapped._replace(generation=self.generation + 1, welcome=welcomed.welcome)
        self._mapped = self._map(channel, mapped, welcomed) if welcomed.descriptors else mapped

    def _map(self, channel: Channel, mapped: MappedArena, welcomed: Handshake) -> MappedArena:
        """Map the files that the daemon passed; if the daemon is still the same one, its arena stays mapped."""
        arena, heartbeat, *inbox = welcomed.descriptors
        try:
            channel.heartbeat = HeartbeatReader(heartbeat)
            mapped = map_inbox(mapped, inbox[0] if inbox else None)
            if not self._with_arena:
                return mapped
            if self.arena.nbytes and welcomed.welcome.boot == self.welcome.boot and not mapped.dma.is_closed:
                return mapped
            return map_arena(mapped, arena)
        finally:
            for descriptor in welcomed.descriptors:
                os.close(descriptor)

    @property
    def mapped(self) -> MappedArena:
        """Generation, welcome and arena of one connection, read at once: another thread may reconnect at any time."""
        return self._mapped

    @property
    def generation(self) -> int:
        return self._mapped.generation

    @property
    def welcome(self) -> protocol.Welcome:
        return self._mapped.welcome

    @property
    def arena(self) -> Bytes:
        """The daemon's arena, read-only where there are inboxes. Copies to a GPU may read it directly."""
        return self._mapped.arena

    @property
    def is_registered(self) -> bool:
        """Whether the arena is registered with CUDA. A process that uses CUDA when it connects registers it soon
        after."""
        return self._mapped.dma.is_registered

    def register(self, device: int = 0) -> bool:
        """Register the arena, and the inbox, now, for processes that started to use CUDA later; returns whether the
        arena is. May take seconds."""
        self._mapped.inbox_dma.register(device)
        return self._mapped.dma.register(device)

    # ---- the end

    def _lose(self, error: BaseException) -> NoReturn:
        self._hang_up()
        self._retry_at = time.monotonic() + self._cool_s
        words = "did not answer in time" if isinstance(error, TimeoutError) else str(error)
        raise ServerGone(f"no daemon at {self._address}: {words}") from error

    def _hang_up(self) -> None:
        """Leases and sequences of this connection are lost: objects that refer to its generation are stale from now
        on."""
        if self._channel:
            self._channel.close()
            self._channel = None
            self._mapped = self._mapped._replace(generation=self.generation + 1)

    def close(self) -> None:
        """Release everything that is held. A later call makes a new connection."""
        with self._lock:
            self._hang_up()
        self._mapped.dma.close()
        self._mapped.inbox_dma.close()

    def retire(self) -> None:
        """As `close`, for good: later calls raise `ServerGone`."""
        self._is_retired = True
        self.close()

    def after_fork(self) -> None:
        """In a forked child: the connection, and what is held over it, belong to the parent."""
        self._lock, self._to_undo = threading.RLock(), []
        self._set_limiters()
        self._to_tell.clear()
        self._hang_up()
        self._mapped.dma.disown()
        self._mapped.inbox_dma.disown()
