"""A TCP listener with a limit on open connections, including those whose handshake never ends.

asyncio's own server counts a TLS connection only after its handshake. Sockets that wait for one could use up all file
descriptors, and then not even the Unix socket could accept.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger("kvweave.server")
HANDSHAKE_S = 5.0
Factory = Callable[[Callable[[], None]], asyncio.Protocol]
"""Makes the protocol of a connection; it must call its argument when the connection ends."""


class Listener:
    """Accepts connections; beyond `most`, new ones are closed at once."""

    def __init__(self, factory: Factory, most: int, tls: ssl.SSLContext | None = None) -> None:
        self._factory, self._most, self._tls = factory, most, tls
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_open = 0

    async def start(self, host: str, port: int) -> None:
        """Raises `OSError`."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                bound = socket.create_server(address[:2], family=family, backlog=128)
            except OSError as error:
                if address == found[-1][-1] and not self._sockets:
                    raise
                log.warning("not listening at %s: %s", address[0], error)  # for example a machine without IPv6
                continue
            bound.setblocking(False)
            self._sockets.append(bound)
            self._keep(loop.create_task(self._accept(bound)))
            if not port:  # with port 0 each family would get another port: one family is enough
                return

    @property
    def port(self) -> int:
        number: int = self._sockets[0].getsockname()[1]
        return number

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(bound)
            except OSError as error:  # out of file descriptors, or the peer closed already
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if self.num_open >= self._most:
                accepted.close()
                continue
            self.num_open += 1
            self._keep(loop.create_task(self._start(accepted)))

    async def _start(self, accepted: socket.socket) -> None:
        ended = _Once(self._ended)
        wait_s = HANDSHAKE_S if self._tls else None
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._factory(ended), accepted, ssl=self._tls, ssl_handshake_timeout=wait_s
            )
        except OSError as error:  # not TLS, or a handshake that takes too long
            log.debug("a connection over TCP did not come about: %s", error)
            accepted.close()
            ended()

    def _ended(self) -> None:
        self.num_open -= 1

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        for task in self._tasks:
            task.cancel()
        for bound in self._sockets:
            bound.close()


class _Once:
    """Calls a function at most once."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call:
            call()
