"""HTTP for Prometheus, health checks and browsers: one GET, one response, then the connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

HEAD_BYTES = 8192
WAIT_S = 5.0
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
HTML, JSON = "text/html; charset=utf-8", "application/json"
SAFETY = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; frame-ancestors 'none'\r\n"
)
"""A page may run what is in itself, ask where it came from, and nothing else."""


class HttpReply(NamedTuple):
    """A status, a text, and what kind of text it is."""

    status: int
    text: str
    kind: str = PLAIN


class HttpPage(asyncio.Protocol):
    """Serves a path with the reply that `page` returns for it."""

    def __init__(self, page: Callable[[str], HttpReply], ended: Callable[[], None]) -> None:
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
            self._transport.write(_reply(HttpReply(431, "too long\n")))
            self._transport.close()

    def _reply(self) -> bytes:
        words = self._head.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return _reply(HttpReply(400, "not HTTP\n"))
        if words[0] not in (b"GET", b"HEAD"):
            return _reply(HttpReply(405, "only GET\n"))
        path = words[1].decode("latin-1").partition("?")[0]
        return _reply(self._page(path), with_body=words[0] == b"GET")


def _reply(reply: HttpReply, *, with_body: bool = True) -> bytes:
    body = reply.text.encode()
    head = f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\nContent-Type: {reply.kind}\r\n{SAFETY}"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (body if with_body else b"")
