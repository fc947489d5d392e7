"""HTTP for Prometheus and health checks: one GET, one response, then the connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

HEAD_BYTES = 8192
WAIT_S = 5.0
PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class HttpPage(asyncio.Protocol):
    """Serves a path with a status and a text."""

    def __init__(self, page: Callable[[str], tuple[int, str]], ended: Callable[[], None]) -> None:
        self._page, self._ended = page, ended
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        asyncio.get_running_loop().call_later(WAIT_S, transport.abort)

    def connection_lost(self, _: Exception | None) -> None:
        self._ended()

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self._transport is None or self._transport.is_closing():
            return
        if b"\r\n\r\n" in self._head or b"\n\n" in self._head:
            self._transport.write(self._reply())
            self._transport.close()
        elif len(self._head) > HEAD_BYTES:
            self._transport.write(_reply(431, "too long\n"))
            self._transport.close()

    def _reply(self) -> bytes:
        words = self._head.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return _reply(400, "not HTTP\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _reply(405, "only GET\n")
        path = words[1].decode("latin-1").partition("?")[0]
        return _reply(*self._page(path), with_body=words[0] == b"GET")


def _reply(status: int, text: str, *, with_body: bool = True) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {PLAIN}\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (body if with_body else b"")
