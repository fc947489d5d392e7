"""One connection at the daemon: decodes requests and encodes replies. No input can stop the daemon.

Requests are served in order. The replies to requests that came together are sent together: during a system call the
threads of tiers get the interpreter, and the event loop waits for them. While a request waits for a tier, later ones
of its connection wait, too; other connections go on. `AHEAD_BYTES` are read meanwhile: a client that ends is noticed. A
message that is too long ends the connection after an error reply, since the start of the next message is unknown.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from kvweave.errors import BadRequest, KVWeaveError, OverLimit, Refused, ServerError
from kvweave.server import protocol
from kvweave.server.client_session import ClientSession
from kvweave.server.framing import FrameBuffer, RateLimiter, read_hello
from kvweave.server.peer import credentials
from kvweave.server.protocol import (
    ERRORS,
    ID_BYTES,
    LENGTH_BYTES,
    MESSAGE_BYTES,
    VERSION,
    Handler,
    Message,
    Reply,
    frame,
    read_request_id,
)
from kvweave.server.report import ClientReport, Report, printable
from kvweave.server.server_state import ServerState

log = logging.getLogger("kvweave.server")
HELLO_S, REFUSAL_S = 10.0, 1.0
"""Seconds for the first message; the same for a connection that will be refused."""
AT_ONCE = 64
"""Requests of one connection that are served before other connections get their turn."""
AHEAD_BYTES = 64 << 10
"""When so many bytes of later requests were read, no more are until the one that waits is done."""
REPLY_BYTES = 64 << 10
"""Replies that are longer together are not kept back: the client may not read them."""


class ConnectionOwner(Protocol):
    """What a connection needs of the daemon."""

    state: ServerState
    token: str | None

    def joined(self, connection: Connection) -> None:
        """Raises `ServerError`, which is sent to the client, or `ConnectionRefusedError` to close without a reply."""
        ...

    def left(self, connection: Connection) -> None: ...

    def report(self) -> Report: ...


class Connection(asyncio.Protocol):
    """A client's connection. One that came over TCP calls `ended` when it ends."""

    def __init__(self, owner: ConnectionOwner, ended: Callable[[], None] | None = None) -> None:
        self._owner, self._state, self._local, self._ended = owner, owner.state, ended is None, ended
        self._session = ClientSession(owner.state)
        self._handlers: dict[type, Handler] = {}
        self._frames, self._pace = FrameBuffer(), RateLimiter(owner.state.settings.limits.requests_per_s)
        self._replies = bytearray()
        """What was not sent yet."""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._refusal: ServerError | None = None
        self._began, self._requests = time.monotonic(), 0
        self._name, self._pid, self._uid = "", 0, -1

    # ---- bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._local:
            self._pid, self._uid = credentials(transport.get_extra_info("socket"))
        try:
            self._owner.joined(self)
        except ServerError as error:
            self._refusal = error  # sent in reply to its Hello
        except ConnectionRefusedError:
            transport.abort()
            return
        asyncio.get_running_loop().call_later(REFUSAL_S if self._refusal else HELLO_S, self._check_hello)

    def _check_hello(self) -> None:
        if not self._handlers and self._transport:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._frames.add(data)
        if not self._task:
            self._pump()
        elif self._frames.num_bytes > AHEAD_BYTES and self._transport:
            self._transport.pause_reading()

    def _pump(self) -> None:
        """Serve the requests that are complete, at most `AT_ONCE` of them, and send the replies."""
        try:
            is_all = self._serve()
        finally:
            self._flush_replies()
        if not is_all:
            asyncio.get_running_loop().call_soon(self._pump)

    def _serve(self) -> bool:
        """Returns whether there is nothing more to serve now."""
        for _ in range(AT_ONCE):
            if self._task or self._paused or self._transport is None or self._transport.is_closing():
                return True
            try:
                message = self._frames.next()
            except OverLimit as error:
                self._fail(error, 0 if self._handlers else None, end=True)
                return True
            if message is None:
                return True
            self._take(message)
            if not self._task and (wait_s := self._pace.rest_s()):
                self._wait(asyncio.sleep(wait_s))
        return False

    # ---- questions

    def _take(self, message: bytes) -> None:
        self._requests += 1
        self._state.counts["requests"] += 1
        request_id, began = read_request_id(message) if self._handlers else None, time.monotonic()
        try:
            reply = self._reply(message)
        except Exception as error:
            self._fail(error, request_id, end=not self._handlers)
            return
        if isinstance(reply, Awaitable):
            self._wait(self._later(reply, request_id, began))
        elif reply is not None:
            self._send_timed(reply, request_id, began)

    def _reply(self, message: bytes) -> Reply | Awaitable[Reply] | None:
        if self._refusal:
            raise self._refusal
        if not self._handlers:
            self._hello(read_hello(message))
            return None
        try:
            request = protocol.read_request(memoryview(message)[ID_BYTES:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"not a kvweave message: {error}") from None
        handler = self._handlers.get(type(request))
        if handler is None:
            why = (
                "said already"
                if isinstance(request, protocol.Hello)
                else "only over the Unix socket, which has the arena"
            )
            raise BadRequest(f"{type(request).__name__}: {why}")
        return handler(request)

    def _send_timed(self, reply: Reply, request_id: int | None, began: float) -> None:
        """Send a reply; the time that a lookup took is observed."""
        self._send(reply, request_id)
        if isinstance(reply, protocol.Found):
            seconds = time.monotonic() - began
            self._state.observations.took("lookup", seconds, self._name, self._session.last_tokens)

    async def _later(self, reply: Awaitable[Reply], request_id: int | None, began: float) -> None:
        try:
            self._send_timed(await reply, request_id, began)
        except Exception as error:
            self._fail(error, request_id)

    def _wait(self, work: Awaitable[None]) -> None:
        """Serve no other request until the work is done."""

        async def wait() -> None:
            try:
                await work
            finally:
                self._task = None
                if self._transport and not self._paused:
                    self._transport.resume_reading()
            self._pump()

        self._task = asyncio.get_running_loop().create_task(wait())

    # ---- the first one

    def _hello(self, hello: protocol.Hello) -> None:
        token = self._owner.token
        if not self._local and not (token and hmac.compare_digest(hello.token.encode(), token.encode())):
            raise Refused("wrong token; the daemon's is in its --token-file")
        self._name = printable(hello.name)
        self._handlers = {
            protocol.Ping: lambda _: protocol.Done(),
            protocol.StatsRequest: lambda _: protocol.StatsReply(self._owner.report()),
            protocol.Describe: lambda request: protocol.DescribeReply(self._state.describe(request.model)),
            # shielded: when the connection ends, what was begun is ended, and counted
            protocol.Clear: lambda request: asyncio.shield(self._clear(request)),
            protocol.Flush: self._flush,
            protocol.Observed: self._observed,
        }
        if self._local:
            self._handlers |= self._session.handlers()
        self._welcome(with_arena=hello.arena and self._local)

    def _welcome(self, *, with_arena: bool) -> None:
        settings, arena = self._state.settings, self._state.arena
        limits = settings.limits
        most = arena.bytes_of(limits.reserve_share)
        reply = protocol.Welcome(
            VERSION, self._state.boot, arena.num_bytes, settings.lease_s, most, limits.sequences, limits.keys,
            settings.inbox,
        )  # fmt: skip
        if not with_arena or self._transport is None:
            self._send(reply, None)
            return
        # asyncio's transport cannot pass descriptors; nothing was written to it before, so the order is kept
        descriptors, inbox = [arena.fd, self._state.heartbeat.fd], self._session.open_inbox()
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as direct:
            socket.send_fds(direct, [frame(reply)], [*descriptors, inbox.fd] if inbox else descriptors)
        if inbox:
            inbox.close_file()

    async def _clear(self, request: protocol.Clear) -> Reply:
        wait_s = max(0.0, min(request.wait_s, 3600.0))
        cleared = protocol.ClearReply(
            await self._state.in_thread("clear", self._state.clear, request.tenant, request.model, wait_s)
        )
        self._state.forget_uses(request.tenant, request.model)
        log.info("cleared %d entries for %s", cleared.entries, self.label)
        for name, trouble in cleared.kept_by.items():
            log.warning("not all of %s is cleared: %s", name, trouble)
        return cleared

    def _observed(self, request: protocol.Observed) -> Reply:
        self._state.observations.took(request.kind, request.seconds, self._name, request.num_tokens)
        return protocol.Done()

    async def _flush(self, request: protocol.Flush) -> Reply:
        return protocol.Done(int(await self._state.backing.flush(max(0.0, min(request.wait_s, 3600.0)))))

    # ---- answers

    def _send(self, reply: Message, request_id: int | None) -> None:
        data = frame(reply, request_id)
        if len(data) > LENGTH_BYTES + MESSAGE_BYTES:
            reason = f"a reply of {len(data)} bytes, {MESSAGE_BYTES} at most"
            data = frame(protocol.Failed(OverLimit.__name__, reason), request_id)
        self._replies += data
        if len(self._replies) > REPLY_BYTES:
            self._flush_replies()

    def _flush_replies(self) -> None:
        if self._replies and self._transport and not self._transport.is_closing():
            self._transport.write(self._replies)
        self._replies = bytearray()

    def _fail(self, error: Exception, request_id: int | None, *, end: bool = False) -> None:
        if isinstance(error, ConnectionError):  # the client closed before its reply
            log.debug("%s: %s", self.label, error)
            self.close()
            return
        self._state.counts["failures"] += 1
        if isinstance(error, KVWeaveError):
            name = type(error).__name__ if type(error).__name__ in ERRORS else ServerError.__name__
            log.debug("%s: %s: %s", self.label, name, error)
            self._send(protocol.Failed(name, str(error)), request_id)
        else:
            log.error("%s: a bug in kvweave", self.label, exc_info=error)
            self._send(protocol.Failed(ServerError.__name__, f"a bug in the daemon: {error!r}"), request_id)
        if end and self._transport:
            self._flush_replies()
            self._transport.close()

    def pause_writing(self) -> None:
        """The client does not read its replies: stop serving it until it does."""
        self._paused = True
        if self._transport:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport:
            self._transport.resume_reading()
            self._pump()

    # ---- the end

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._task:
            self._task.cancel()
        self._state.counts["returned"] += self._session.give_back()
        self._owner.left(self)
        if self._ended:
            self._ended()

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def expire(self, now: float) -> None:
        expired = self._session.expire(now)
        self._state.counts["expired"] += expired
        if expired:
            log.warning("%s: %d leases expired", self.label, expired)

    @property
    def label(self) -> str:
        who = f"process {self._pid}" if self._local else "a client over TCP"
        return f"{who} ({self._name})" if self._name else who

    @property
    def user(self) -> int:
        return self._uid

    @property
    def local(self) -> bool:
        return self._local

    def report(self) -> ClientReport:
        held, session = self._session.leases, self._session
        return ClientReport(
            self._name, self._pid, self._uid, time.monotonic() - self._began, self._requests,
            session.num_sequences, len(held), held.leased_bytes, held.reserved_bytes,
        )  # fmt: skip
