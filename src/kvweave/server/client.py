"""A client of a daemon: questions out, answers in, and the daemon's arena mapped. Blocking; connected anew when lost.

Whatever the daemon does, a call ends when its time is over. A daemon that is frozen is left alone at once, and taken up
again when it shows a sign of life. A process that was forked has a connection of its own from then on.
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
from kvweave.server.channel import Channel, Handshake
from kvweave.server.heartbeat import HeartbeatReader
from kvweave.server.mapping import MappedArena, map_arena, unmapped
from kvweave.server.peer import check_server
from kvweave.server.protocol import DIGEST, ERRORS, VERSION, Answer, Message
from kvweave.store.closing import ClosedAtEnd
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes

A = TypeVar("A", bound=Message)
Questions = Sequence[Message] | Callable[[], Sequence[Message]]
TOLD = 64
HELLO_S = 2.0
"""How long a daemon that is there takes at most to say its first word."""


class Replies(NamedTuple):
    """Answers, and the number of the connection that they came over."""

    answers: list[Answer]
    generation: int


class Client(ClosedAtEnd):
    """A daemon at `address`: the path of its Unix socket, or `HOST:PORT` (with `token`; no arena then).
    `arena`: whether it is mapped.

    Many threads may ask; one question is under way at a time, and the others' time runs while they wait. When the
    daemon is gone, `ServerGone` comes at once for `cool_s`, then it is tried again. What it holds is lost with the
    connection, and `generation` is another one.
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
        self._retry_at = 0.0
        self._to_undo: list[Message] = []
        self._to_tell: deque[Message] = deque(maxlen=TOLD)
        self._mapped = unmapped()
        register_after_fork(self)
        with self._lock:
            self._connect(time.monotonic() + timeout_s)

    # ---- asking

    def ask(self, question: Message, answer: type[A], timeout_s: float | None = None) -> A:
        """The answer; an error of the daemon's is raised here."""
        return self.check(self.exchange([question], timeout_s).answers[0], answer)

    def exchange(self, questions: Questions, timeout_s: float | None = None) -> Replies:
        """Several questions in one round trip. `Failed` is an answer like others.

        Questions that depend on the connection are made by a function, which is called when there is one. A connection
        that turns out to have ended is made anew, once: what it held is gone, and `generation` says so.
        """
        until = time.monotonic() + (self._timeout_s if timeout_s is None else max(0.0, timeout_s))
        try:
            if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
                raise ServerTimeout(f"{self._address}: another thread's question is still under way")
            fresh = self._channel is None
            channel = self._channel or self._connect(until)
            try:
                return self._asked(channel, questions, until)
            except ConnectionError as error:
                if fresh:
                    self._lose(error)
            try:
                return self._asked(self._connect(until), questions, until)
            except ConnectionError as error:
                self._lose(error)
        finally:  # an interrupt may have come before anybody could note that the lock is ours
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()

    def _asked(self, channel: Channel, questions: Questions, until: float) -> Replies:
        made: Sequence[Message] = ()
        try:
            channel.check()
            made = questions() if callable(questions) else questions
            first, self._to_undo = [*self._to_undo, *self._to_tell], []
            self._to_tell.clear()
            requests = channel.send([*first, *made], until)[len(first) :]
            return Replies(channel.receive(requests, until), self.generation)
        except ServerTimeout:
            self._to_undo += [message for question in made if (message := protocol.undo(question))]
            if channel.is_closed:
                self._hang_up()
            raise
        except (OSError, msgspec.MsgspecError) as error:
            self._hang_up()
            if isinstance(error, ConnectionError):
                raise
            self._lose(error)
        except BaseException:  # what was sent, and what of it was answered, nobody knows
            self._hang_up()
            raise

    @staticmethod
    def check(answer: Answer, kind: type[A]) -> A:
        """An answer out of `exchange` as what it should be; an error is raised."""
        if isinstance(answer, protocol.Failed):
            raise ERRORS.get(answer.error, ServerError)(answer.message)
        if not isinstance(answer, kind):
            raise ServerError(f"{kind.__name__} expected, the daemon answered {type(answer).__name__}")
        return answer

    def tell(self, message: Message) -> None:
        """Send it along with the next question; its answer does not matter. Of many, the last ones."""
        self._to_tell.append(message)

    def number(self) -> int:
        """One that was not used yet on any connection of this client."""
        return next(self._numbers)

    def again(self, *, arena: bool, timeout_s: float | None = None) -> Client:
        """Another connection to the same daemon, which may take so long."""
        if channel := self._channel:
            with suppress(ConnectionError):
                channel.check()
        return Client(
            self._address, name=self._name, token=self._token, tls=self._tls, cool_s=self._cool_s,
            arena=arena, timeout_s=self._timeout_s if timeout_s is None else max(0.0, timeout_s),
        )  # fmt: skip

    # ---- connecting

    def _connect(self, until: float) -> Channel:
        if time.monotonic() < self._retry_at:
            raise ServerGone(f"no daemon at {self._address}, as of {self._cool_s} s ago")
        until = min(until, time.monotonic() + HELLO_S)
        try:
            channel = Channel(self._open(max(0.001, until - time.monotonic())))
        except OSError as error:
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
        if isinstance(self._address, Path) or not colon or not port.isdecimal():
            here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                here.settimeout(timeout_s)
                here.connect(str(self._address))
                check_server(here, Path(self._address))
            except BaseException:
                here.close()
                raise
            return here
        there = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._tls.wrap_socket(there, server_hostname=host) if self._tls else there

    def _hello(self, channel: Channel, until: float) -> None:
        hello = protocol.Hello(VERSION, DIGEST, self._name, self._token, channel.is_local)
        welcomed = channel.greet(hello, until)
        mapped = self._mapped._replace(generation=self.generation + 1, welcome=welcomed.welcome)
        self._mapped = self._map(channel, mapped, welcomed) if welcomed.descriptors else mapped

    def _map(self, channel: Channel, mapped: MappedArena, welcomed: Handshake) -> MappedArena:
        """Map what the daemon handed over; the arena of a daemon that is still the same is mapped already."""
        arena, heartbeat = welcomed.descriptors
        try:
            channel.heartbeat = HeartbeatReader(heartbeat)
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
        """The connection's, as one: another thread may make a new one at any time."""
        return self._mapped

    @property
    def generation(self) -> int:
        return self._mapped.generation

    @property
    def welcome(self) -> protocol.Welcome:
        return self._mapped.welcome

    @property
    def arena(self) -> Bytes:
        """All of the daemon's memory. Copies to a GPU may start there."""
        return self._mapped.arena

    @property
    def is_registered(self) -> bool:
        """Whether CUDA knows the arena: soon after a connection was made by a process that used CUDA then."""
        return self._mapped.dma.is_registered

    def register(self, device: int = 0) -> bool:
        """Register the arena now, in a process that came to use CUDA later; whether it is. May take seconds."""
        return self._mapped.dma.register(device)

    # ---- the end

    def _lose(self, error: BaseException) -> NoReturn:
        self._hang_up()
        self._retry_at = time.monotonic() + self._cool_s
        words = "did not answer in time" if isinstance(error, TimeoutError) else str(error)
        raise ServerGone(f"no daemon at {self._address}: {words}") from error

    def _hang_up(self) -> None:
        """What was held is not any more, so whatever refers to this connection is of an earlier one from now on."""
        if self._channel:
            self._channel.close()
            self._channel = None
            self._mapped = self._mapped._replace(generation=self.generation + 1)

    def close(self) -> None:
        """Give back everything that is held. It may be asked again, over a new connection."""
        with self._lock:
            self._hang_up()
        self._mapped.dma.close()

    def after_fork(self) -> None:
        """In a forked child: the connection, and what is held over it, are the parent's."""
        self._lock, self._to_undo = threading.RLock(), []
        self._to_tell.clear()
        self._hang_up()
        self._mapped.dma.disown()
