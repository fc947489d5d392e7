"""A client's connection: questions out, answers in, and the daemon's arena mapped. Blocking; made anew when lost."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import msgspec
import numpy as np

from kvweave.errors import BadRequest, ServerError, ServerGone
from kvweave.server import protocol as say
from kvweave.server.dma import Registration, device_in_use
from kvweave.server.protocol import DIGEST, ERRORS, LENGTH_BYTES, MESSAGE_BYTES, VERSION, Answer, Message, frame
from kvweave.store.keys import Bytes

A = TypeVar("A", bound=Message)
POPULATE_WRITE = 23
"""madvise: make the page tables now, not at the first touch of every page."""
WARM_BYTES = 8 << 20


class Mapped(NamedTuple):
    """What a connection brought: its number, what the daemon said, and its arena, perhaps registered for DMA."""

    generation: int
    welcome: say.Welcome
    arena: Bytes
    dma: Registration


class Client:
    """A daemon at `address`: the path of its Unix socket, or `HOST:PORT` (with `token`; no arena then).

    Many threads may ask; one question is under way at a time. When the daemon is gone, `ServerGone` comes at once for
    `cool_s`, then it is tried again. What it holds is lost with the connection, and `generation` is another one.
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
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._buffer = bytearray()
        nothing = np.empty(0, np.uint8)
        self._mapped = Mapped(0, say.Welcome(VERSION, b"", 0, 0.0, 0, 0, 0), nothing, Registration(nothing))
        with self._lock:
            self._connect()

    # ---- asking

    def ask(self, question: Message, answer: type[A], timeout_s: float | None = None) -> A:
        """The answer; an error of the daemon's is raised here."""
        return self.check(self.exchange([question], timeout_s)[0], answer)

    def exchange(self, questions: Sequence[Message], timeout_s: float | None = None) -> list[Answer]:
        """Several questions in one round trip. `Failed` is an answer like others.

        A connection that turns out to have ended is made anew, once: what it held is gone, and `generation` says so.
        """
        with self._lock:
            if self._socket is not None:
                with suppress(ConnectionError):
                    return self._exchange(questions, timeout_s)
                self._hang_up()
            self._connect()
            try:
                return self._exchange(questions, timeout_s)
            except ConnectionError as error:
                self._lose(error)

    def _exchange(self, questions: Sequence[Message], timeout_s: float | None) -> list[Answer]:
        assert self._socket is not None
        try:
            self._socket.settimeout(self._timeout_s if timeout_s is None else timeout_s)
            self._socket.sendall(b"".join(map(frame, questions)))
            return [self._receive() for _ in questions]
        except ConnectionError:
            raise
        except (OSError, msgspec.MsgspecError, ServerError) as error:
            self._lose(error)

    @staticmethod
    def check(answer: Answer, kind: type[A]) -> A:
        """An answer out of `exchange` as what it should be; an error is raised."""
        if isinstance(answer, say.Failed):
            raise ERRORS.get(answer.error, ServerError)(answer.message)
        if not isinstance(answer, kind):
            raise ServerError(f"{kind.__name__} expected, the daemon answered {type(answer).__name__}")
        return answer

    def _receive(self) -> Answer:
        length = int.from_bytes(self._take(LENGTH_BYTES), "little")
        if length > MESSAGE_BYTES:
            raise ServerError(f"an answer of {length} bytes: this is no daemon of ours")
        answer: Answer = say.read_answer(self._take(length))
        return answer

    def _take(self, count: int) -> bytes:
        assert self._socket is not None
        while len(self._buffer) < count:
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("the daemon closed the connection")
            self._buffer += piece
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def number(self) -> int:
        """One that was not used yet on any connection of this client."""
        return next(self._numbers)

    def again(self) -> Client:
        """Another connection to the same daemon."""
        return Client(
            self._address, name=self._name, token=self._token, tls=self._tls, timeout_s=self._timeout_s,
            cool_s=self._cool_s, arena=self._with_arena,
        )  # fmt: skip

    # ---- connecting

    def _connect(self) -> None:
        if time.monotonic() < self._retry_at:
            raise ServerGone(f"no daemon at {self._address}, as of {self._cool_s} s ago")
        try:
            self._socket = self._open()
            self._socket.settimeout(self._timeout_s)
            self._hello()
        except (OSError, msgspec.MsgspecError) as error:
            self._lose(error)
        except ServerError:
            self._hang_up()
            raise

    def _open(self) -> socket.socket:
        host, colon, port = str(self._address).rpartition(":")
        if isinstance(self._address, Path) or not colon or not port.isdecimal():
            here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            here.settimeout(self._timeout_s)
            here.connect(str(self._address))
            return here
        there = socket.create_connection((host.strip("[]"), int(port)), self._timeout_s)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._tls.wrap_socket(there, server_hostname=host) if self._tls else there

    def _hello(self) -> None:
        assert self._socket is not None
        local = self._socket.family == socket.AF_UNIX
        hello = say.Hello(VERSION, DIGEST, self._name, self._token, self._with_arena and local)
        self._buffer.clear()
        self._socket.sendall(frame(hello))
        if not hello.arena:
            welcome = self.check(self._receive(), say.Welcome)
            self._mapped = self._mapped._replace(generation=self.generation + 1, welcome=welcome)
            return
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        self._buffer += data
        try:
            welcome = self.check(self._receive(), say.Welcome)
            if not descriptors:
                raise BadRequest("the daemon sent no arena")
            self._mapped = Mapped(self.generation + 1, welcome, *_map(descriptors[0], welcome.arena_bytes))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @property
    def mapped(self) -> Mapped:
        """The connection's, as one: another thread may make a new one at any time."""
        return self._mapped

    @property
    def generation(self) -> int:
        return self._mapped.generation

    @property
    def welcome(self) -> say.Welcome:
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

    def _lose(self, error: Exception) -> NoReturn:
        self._hang_up()
        self._retry_at = time.monotonic() + self._cool_s
        words = "did not answer in time" if isinstance(error, TimeoutError) else str(error)
        raise ServerGone(f"no daemon at {self._address}: {words}") from error

    def _hang_up(self) -> None:
        with self._lock:
            if self._socket:
                self._socket.close()
                self._socket = None

    def close(self) -> None:
        """Give back everything that is held. It may be asked again, over a new connection."""
        self._hang_up()
        self._mapped.dma.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map(descriptor: int, num_bytes: int) -> tuple[Bytes, Registration]:
    memory = mmap.mmap(descriptor, num_bytes)
    arena = np.frombuffer(memory, np.uint8)
    dma = Registration(arena)
    threading.Thread(target=_warm, args=(memory, dma, device_in_use()), name="kvweave-warm", daemon=True).start()
    return arena, dma


def _warm(memory: mmap.mmap, dma: Registration, device: int | None) -> None:
    _populate(memory)
    if device is not None:
        dma.register(device)


def _populate(memory: mmap.mmap) -> None:
    for start in range(0, len(memory), WARM_BYTES):
        try:
            memory.madvise(POPULATE_WRITE, start, min(WARM_BYTES, len(memory) - start))
        except OSError:  # an older kernel: then pages come one by one
            return
