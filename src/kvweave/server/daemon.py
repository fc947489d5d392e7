"""The daemon: listens, expires leases, and drains its tiers when it stops."""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import msgspec

from kvweave.errors import Busy, ConfigError, OverLimit, Refused, ServerError
from kvweave.server.connection import Connection
from kvweave.server.http import HTML, JSON, HttpPage, HttpReply
from kvweave.server.listener import Listener
from kvweave.server.metrics import metrics
from kvweave.server.report import Report
from kvweave.server.server_state import ServerState
from kvweave.server.settings import Disk, Settings, address, read_token
from kvweave.server.shared_arena import SharedArena
from kvweave.store import DiskTier, Tier, TierPolicy, TierStack
from kvweave.store.batches import BATCH_BYTES
from kvweave.store.files import DirectoryLock
from kvweave.store.reopening_tier import ReopeningTier
from kvweave.units import format_bytes

log = logging.getLogger("kvweave.server")
HTTP_AT_ONCE = 32
SOCKET_BYTES = 107
"""Of the path of a Unix socket, at most."""
DASHBOARD = (files("kvweave.server") / "dashboard.html").read_text(encoding="utf-8")
REFUSED_AT_ONCE = 64
EXTRAS = "pip install 'kvweave[redis]', 'kvweave[object]' or 'kvweave[mooncake]'"


class Daemon:
    """An arena, tiers and sockets. `async with` starts and stops it; `backing` replaces the tiers of `settings`."""

    def __init__(self, settings: Settings, backing: TierStack | None = None) -> None:
        self.settings = settings
        self.token = read_token(settings.token_file) if settings.token_file else None
        self._lock = _own(settings.socket)
        try:
            arena = SharedArena(settings.memory, quotas=settings.quotas, read_only=bool(settings.inbox))
            self.state = ServerState(settings, arena, backing or _backing_tiers(settings))
        except BaseException:
            self._lock.release()
            raise
        self._connections: set[Connection] = set()
        self._unix: asyncio.Server | None = None
        self._listeners: list[Listener] = []
        self._refused: set[Connection] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.is_stuck = False
        """After the stop: whether a tier hung, and its threads with it."""

    async def __aenter__(self) -> Daemon:
        loop = asyncio.get_running_loop()
        self.state.run(loop)
        try:
            await self._listen(loop)
        except BaseException:
            await self.__aexit__()
            raise
        self._sweeper = loop.create_task(self._sweep())
        log.info("serving %s at %s", format_bytes(self.settings.memory), self.settings.socket)
        for executor in self.state.backing.executors:
            stats = executor.tier.stats()
            log.info("tier %s: %s entries", stats.name, "unknown" if stats.entries is None else stats.entries)
        return self

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        settings = self.settings
        settings.socket.unlink(missing_ok=True)  # the lock is held, so the daemon that bound the socket has ended
        with _umask(0o177):
            self._unix = await loop.create_unix_server(lambda: Connection(self), str(settings.socket))
        if settings.group:
            os.chown(settings.socket, -1, _group(settings.group))
            settings.socket.chmod(0o660)
        if settings.listen:
            there = Listener(lambda ended: Connection(self, ended), settings.limits.connections, _tls(settings))
            await self._listen_at(settings.listen, there)
        if settings.http:
            await self._listen_at(settings.http, Listener(lambda ended: HttpPage(self._page, ended), HTTP_AT_ONCE))

    async def _listen_at(self, place: str, listener: Listener) -> None:
        self._listeners.append(listener)
        try:
            await listener.start(*address(place))
        except OSError as error:
            raise ConfigError(f"cannot listen at {place}: {error}") from error

    @property
    def ports(self) -> list[int]:
        """Ports of the TCP sockets, in the order of settings: `listen`, `http`."""
        return [listener.port for listener in self._listeners]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease_s / 8)
            for connection in [*self._connections]:
                connection.expire(time.monotonic())

    # ---- connections

    def joined(self, connection: Connection) -> None:
        refusal = self._refusal(connection)
        if refusal is None:
            self._connections.add(connection)
            return
        if len(self._refused) >= REFUSED_AT_ONCE:
            raise ConnectionRefusedError("too many that are refused wait to be told so")
        self._refused.add(connection)
        raise refusal

    def _refusal(self, connection: Connection) -> ServerError | None:
        alike = [each for each in self._connections if each.local == connection.local]
        most = self.settings.limits.connections
        if len(alike) >= most:
            return OverLimit(f"{most} connections are open already")
        if connection.local and not self.settings.group and connection.user not in (0, os.getuid()):
            return Refused(f"user {connection.user} may not use the daemon of user {os.getuid()}; see --group")
        return None

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._refused.discard(connection)

    # ---- telling

    def report(self) -> Report:
        return self.state.report([connection.report() for connection in self._connections])

    def _page(self, path: str) -> HttpReply:
        if path == "/metrics":
            return HttpReply(200, metrics(self.report()))
        if path in ("/health", "/healthz"):
            return HttpReply(503, "stopping\n") if self.state.stopping else HttpReply(200, "ok\n")
        if path in ("/", "/dashboard"):
            return HttpReply(200, DASHBOARD, HTML)
        if path == "/report.json":
            return HttpReply(200, msgspec.json.encode(self.report()).decode(), JSON)
        return HttpReply(404, "there are / (a dashboard), /report.json, /metrics and /health\n")

    # ---- the end

    async def __aexit__(self, *_: object) -> None:
        """Refuse new connections, write what a restart shall find, then close."""
        self.state.stopping = True
        for server in (self._unix, *(self._listeners[:-1] if self.settings.http else self._listeners)):
            if server:
                server.close()
        for connection in [*self._connections]:
            connection.close()
        if self._sweeper:
            self._sweeper.cancel()
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        # the loop's default threads: those of `ServerState` may be blocked by a client's long clear
        done = await loop.run_in_executor(None, self.state.backing.drain, self.settings.drain_s)
        if self.state.backing.executors:
            log.info("%s after %.1f s", "drained" if done else "not drained", time.monotonic() - began)
        for listener in self._listeners:
            listener.close()
        left_s = max(1.0, self.settings.drain_s - (time.monotonic() - began))
        self.is_stuck = not await loop.run_in_executor(None, self.state.close, left_s)
        self.state.heartbeat.close()
        with suppress(FileNotFoundError):
            self.settings.socket.unlink()
        self._lock.release()


def _own(path: Path) -> DirectoryLock:
    """One daemon for each socket: the kernel releases the lock when the process ends, however it ends."""
    if (num_bytes := len(os.fsencode(path))) > SOCKET_BYTES:
        raise ConfigError(f"{path} has {num_bytes} bytes, {SOCKET_BYTES} at most for a socket; take a shorter --socket")
    if path.is_file() and path.stat().st_size:
        raise ConfigError(f"{path} is a file and no socket, and is not replaced by one: name another --socket")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.parent.stat().st_uid not in (0, os.getuid()):
            raise ConfigError(f"{path.parent} belongs to another user, who could take the socket's place")
        return DirectoryLock(path.with_name(path.name + ".lock"))
    except Busy as error:
        owner = str(error).partition("process ")[2].partition(";")[0]
        raise Busy(f"{path} is served by process {owner} already; stop it, or take another --socket") from None
    except OSError as error:
        why = f"{error.strerror} ({error.filename})"
        raise ConfigError(f"cannot serve at {path}: {why}; take another --socket") from error


def _backing_tiers(settings: Settings) -> TierStack | None:
    """The tiers that settings name, the nearest first. Queued writes hold at most a quarter of the arena."""
    policy = TierPolicy(write="back", queue_jobs=max(1, min(32, settings.memory // 4 // BATCH_BYTES)))
    tiers: list[tuple[Tier, TierPolicy]] = []
    try:
        for tier, deadline_s in _tiers(settings):
            tiers.append((tier, replace(policy, deadline_s=deadline_s)))
    except BaseException as error:
        for tier, _ in tiers:
            tier.close()
        if isinstance(error, ImportError):
            raise ConfigError(f"{error}; the tiers' clients are extras: {EXTRAS}") from error
        raise
    return TierStack(*tiers) if tiers else None


def _tiers(settings: Settings) -> Iterator[tuple[Tier, float]]:
    """Each tier with its deadline in seconds."""
    if settings.disk:
        _check_size(settings.disk)
        disk = partial(DiskTier, settings.disk.directory, settings.disk.capacity, quotas=settings.quotas)
        yield ReopeningTier("disk", "disk", disk), 2.0
    if settings.redis:
        from kvweave.store.redis_tier import RedisTier  # noqa: PLC0415 - an extra

        yield RedisTier(settings.redis), 2.0
    if settings.mooncake:
        from kvweave.store.mooncake_tier import MooncakeTier  # noqa: PLC0415 - an extra

        yield MooncakeTier(settings.mooncake), 2.0
    if settings.object:
        from kvweave.store.object_tier import ObjectTier  # noqa: PLC0415 - an extra

        yield ObjectTier(settings.object), 10.0


def _check_size(disk: Disk) -> None:
    """Raise `ConfigError` for more than the size of the file system; log a warning for more than is free."""
    place = next(each for each in (disk.directory.absolute(), *disk.directory.absolute().parents) if each.exists())
    found = os.statvfs(place)
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    if total and disk.capacity > total:
        raise ConfigError(
            f"{format_bytes(disk.capacity)} of {disk.directory}: its file system has {format_bytes(total)} in all, and"
            f" {format_bytes(free)} free; take less"
        )
    stored = sum(path.lstat().st_blocks * 512 for path in disk.directory.glob("blobs-*"))
    if disk.capacity > free + stored:
        log.warning(
            "%s of %s: %s are free beside what is stored there; it is full before its size is reached",
            format_bytes(disk.capacity), disk.directory, format_bytes(free),
        )  # fmt: skip


def _group(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group {name!r}") from None


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if not settings.tls_cert or not settings.tls_key:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # also of ssl; it names neither file
        raise ConfigError(
            f"--tls-cert {settings.tls_cert} with --tls-key {settings.tls_key} cannot be used: {error}"
        ) from error
    return context


class _umask:  # noqa: N801 - a verb
    """Set the file mode mask within a block."""

    def __init__(self, mask: int) -> None:
        self._mask = mask

    def __enter__(self) -> None:
        self._before = os.umask(self._mask)

    def __exit__(self, *_: object) -> None:
        os.umask(self._before)
