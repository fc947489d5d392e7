"""What can go wrong, as one tree.

    KVWeaveError
    +-- SpecError            a declaration contradicts itself
    |   +-- UnknownName      a name (dtype, reach, key) that is not declared; gives the nearest known one
    +-- ConfigError          a config.json cannot be read, or lacks what its layers need
    +-- PlanError            memory cannot be cut as asked
        +-- NeverFits        not even an empty pool of this size holds it; gives the size that does; a CacheError too
        +-- DraftMismatch    a draft model's caches match no group of the target
            +-- AmbiguousDraft   ... or match several
    +-- CacheError           a cache cannot do what was asked of it
        +-- OutOfPages       too few free pages now: which groups lack them, which sequences could be preempted
        +-- BadOption        an argument of a cache, a retention or a simulation is out of range
        +-- BadType          an argument of a cache is of a type that it cannot be
        +-- BadTokens        a prompt is not a list of token ids
        +-- BadSequence      a sequence of another cache, a closed one, or lengths out of range
        +-- NotSettled       steps, drafts or copies are not finished; says what to do first
        +-- CannotTruncate   pages or states that the shorter sequence needs are gone
        +-- BadCall          a model was called in a way that pages cannot follow
        +-- WrongThread      a cache belongs to the thread that made it
    +-- TensorError          memory cannot be allocated, or not be used as asked
        +-- OutOfMemory      the machine has too little memory; nothing stays allocated
        +-- NoDevice         the device is not available
        +-- ArenaClosed      the memory was freed already
        +-- BadRows          rows, slots or pages do not match the shape of the cache
        +-- NoKernel         a backend cannot compute attention over a layer's pages, with the reason
    +-- TraceError           a trace cannot be read, or not be replayed as asked
        +-- LengthsOnly      it has lengths of requests and no tokens, so reuse cannot be computed
    +-- MissingExtra         packages are not installed; says which extra to install
    +-- NotBuilt             a C extension was not built when kvweave was installed; says what to do
    +-- CannotServe          a model's cache cannot be kept in pages, with the reason
    +-- QueueFull            an engine has as many requests as it may have; retry later
    +-- OperationCancelled   a submitted operation was cancelled before it was done
    +-- OperationTimeout     a submitted operation is not done yet; it continues, and may be waited for again
    +-- TransferError        pages cannot be moved
        +-- BadCopy          pages, chunks, buffers or layouts do not match; nothing moved
        +-- TransferFailed   it failed midway; the contents of its target are undefined
        +-- TransferCancelled  it was cancelled; likewise. An OperationCancelled, too
        +-- TransferTimeout  it is not done yet. An OperationTimeout, too
    +-- StoreError           a store cannot be opened, or not be used as asked
        +-- TierError        a tier failed; the others continue
            +-- TierFull     its disk or server is full, whatever its quota
            +-- ReadOnly     it can be read, but not be written
            +-- Busy         another process owns its directory
            +-- Unreadable   stored bytes cannot be read: they are removed
            +-- PartlyRead   some of the requested blobs are unreadable; the others were read
            +-- Vanished     its directory was removed: it must be opened again
        +-- ServerError      the daemon refused or failed a request
            +-- ServerGone   no daemon answers at the socket
                +-- ServerTimeout  the daemon did not answer in time: slow, or frozen
            +-- Refused      the daemon rejects this client: version, token, user
            +-- BadRequest   a request is damaged, names something unknown, or is not allowed on this connection
            +-- OverLimit    a request exceeds the limits of a message or of a connection
            +-- LeaseExpired the reservation ended before the commit; nothing became visible

    KVWeaveWarning           something works, but not well
    +-- CoarseReuse          blocks of a plan's groups seldom end together, so that few prefixes can be reused
    +-- PolicyFailed         a user's eviction policy raised, or its keys cannot be ordered: LRU decides from then on
    +-- EventLost            a user's on_event raised: it was not told of a change

Every message has the numbers and the cure; an error changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class KVWeaveError(Exception):
    """Base of all errors that kvweave raises on purpose."""


class KVWeaveWarning(UserWarning):
    """Base of all warnings of kvweave."""


class CoarseReuse(KVWeaveWarning):
    """Blocks of a plan's groups seldom end at the same token, so prefixes are reused in large steps only."""


class PolicyFailed(KVWeaveWarning):
    """A user's eviction policy raised, or answered what has no order: LRU decides from then on."""


class EventLost(KVWeaveWarning):
    """A user's `on_event` raised: it was not told of a change, and what it follows differs from the cache."""


class SpecError(KVWeaveError, ValueError):
    """A declaration contradicts itself."""


class UnknownName(SpecError):
    """A name that is not declared."""

    def __init__(self, what: str, name: object, known: Iterable[str]) -> None:
        choices = sorted(map(str, known))  # an enum member is its value here
        close = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(choices)}"
        super().__init__(f"unknown {what} {name!r}; {hint}")


class ConfigError(KVWeaveError, ValueError):
    """A model's config cannot be read, or lacks a field that its layers need."""


class PlanError(KVWeaveError, ValueError):
    """Memory cannot be cut as asked."""


class DraftMismatch(PlanError):
    """A draft model's cache has no equal among the target's groups."""


class AmbiguousDraft(DraftMismatch):
    """A draft model's cache equals several of the target's groups."""


class CacheError(KVWeaveError):
    """A cache cannot do what was asked of it; nothing was changed."""


class NeverFits(PlanError, CacheError):
    """The request would not fit an empty pool; `smallest_bytes` would do."""

    def __init__(self, message: str, *, available_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.available_bytes = available_bytes
        self.smallest_bytes = smallest_bytes


class Shortage(NamedTuple):
    """Pages of a group: those that were wanted, are free, or could be evicted."""

    tag: str
    wanted: int
    available: int
    evictable: int


class OutOfPages(CacheError):
    """Not enough pages now; when steps are committed or sequences close, there will be. Nothing was evicted or changed.

    `sequences` of the call do not fit; the others would, without them. Closing some of the `preemptible` ones (running,
    and not part of the call; lowest priority first, then the youngest) makes room; what they computed stays cached.
    """

    def __init__(
        self, pool: str, shortages: Sequence[Shortage], sequences: Sequence[Any] = (), preemptible: Sequence[Any] = ()
    ) -> None:
        lacking = "; ".join(
            f"{s.wanted} pages of {s.tag!r} wanted, {s.available} available, {s.evictable} more by eviction"
            for s in shortages
        )
        super().__init__(
            f"pool {pool!r}: {lacking}; {len(sequences)} sequences of the call do not fit: commit steps in"
            " flight, close or preempt a sequence"
        )
        self.pool, self.shortages = pool, tuple(shortages)
        self.sequences, self.preemptible = tuple(sequences), tuple(preemptible)


class BadOption(CacheError, ValueError):
    """An argument of a cache, a retention or a simulation is out of range."""


class BadType(CacheError, TypeError):
    """An argument of a cache is of a type that it cannot be."""


class BadTokens(CacheError, ValueError):
    """A prompt is not a list of token ids."""


class BadSequence(CacheError, ValueError):
    """A sequence of another cache, a closed one, or a length out of range."""


class NotSettled(CacheError, RuntimeError):
    """Steps, drafts or copies are not finished, so this cannot be done yet."""


class CannotTruncate(CacheError, ValueError):
    """Pages or states that the shorter sequence needs are gone: open it again from its tokens."""


class BadCall(CacheError, ValueError):
    """A model was called, or was changed, in a way that pages cannot follow; nothing was cached."""


class WrongThread(CacheError, RuntimeError):
    """A cache belongs to the thread that made it."""


class TensorError(KVWeaveError):
    """Memory cannot be allocated, or cannot be used as asked."""


class OutOfMemory(TensorError, MemoryError):
    """The machine has too little memory; nothing stays allocated."""

    def __init__(self, where: str, *, wanted_bytes: int, reason: str) -> None:
        super().__init__(f"{where}: cannot allocate {wanted_bytes} bytes ({reason}); ask for less memory")
        self.wanted_bytes = wanted_bytes


class NoDevice(TensorError, RuntimeError):
    """The device is not available."""


class ArenaClosed(TensorError, RuntimeError):
    """The memory was freed already."""


class BadRows(TensorError, ValueError):
    """Rows, slots or pages do not match the shape of the cache; nothing was written."""


class NoKernel(TensorError, ValueError):
    """A backend cannot attend to a layer's pages."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} cannot be attended to in its pages: {reason}")
        self.reason = reason


class StoreError(KVWeaveError):
    """A store cannot be opened, or cannot be used as asked."""


class TierError(StoreError):
    """A tier failed: a read is a miss, a write stored nothing."""


class TierFull(TierError):
    """A tier's disk or server is full, whatever its quota; stored blobs are still served."""


class ReadOnly(TierError):
    """A tier can be read, but not be written."""


class Busy(TierError):
    """A tier's directory belongs to another process, which is running."""


class Unreadable(TierError):
    """Bytes that a tier stores cannot be read, now or later."""


class PartlyRead(TierError):
    """Some of the requested blobs could not be read, and were removed; `answer` has the others, `num_read` of them."""

    def __init__(self, message: str, answer: object, num_read: int) -> None:
        super().__init__(message)
        self.answer = answer
        self.num_read = num_read


class Vanished(TierError):
    """A tier's directory was removed or replaced; it must be opened again."""


class ServerError(StoreError):
    """The daemon refused or failed a request; nothing was changed."""


class ServerGone(ServerError):
    """No daemon answers at the socket, or not in time."""


class ServerTimeout(ServerGone):
    """The daemon did not answer in time: it is slow, or frozen. The connection is kept; a late answer is dropped."""


class Refused(ServerError):
    """The daemon rejects this client: version, token or user."""


class BadRequest(ServerError):
    """A request is damaged, names something unknown, or is not allowed on this kind of connection."""


class OverLimit(ServerError):
    """A request exceeds the limits of a message or of a connection."""


class LeaseExpired(ServerError):
    """The reservation ended before the commit; nothing of it became visible."""


class QueueFull(KVWeaveError):
    """An engine has as many requests as it may have; retry when some are answered."""


class OperationCancelled(KVWeaveError):
    """A submitted operation was cancelled: what was done stays done, the rest is not begun."""


class OperationTimeout(KVWeaveError, TimeoutError):
    """A submitted operation is not done yet. It continues, and may be waited for again."""


class TransferError(KVWeaveError):
    """Pages cannot be moved."""


class BadCopy(TransferError, ValueError):
    """Pages, chunks, buffers or layouts do not match; nothing was moved."""


class TransferFailed(TransferError, RuntimeError):
    """A transfer failed midway: the contents of its target are undefined."""


class TransferCancelled(TransferError, OperationCancelled):
    """A transfer was cancelled: the contents of its target are undefined."""


class TransferTimeout(TransferError, OperationTimeout):
    """A transfer is not done yet. It continues, and may be waited for again."""


class TraceError(KVWeaveError, ValueError):
    """A trace cannot be read, or cannot be replayed as asked."""


class LengthsOnly(TraceError):
    """A trace has lengths of requests and no tokens, so reuse cannot be computed."""


class MissingExtra(KVWeaveError, ImportError):
    """Packages that a part of kvweave needs are not installed."""

    def __init__(self, what: str, extra: str, package: str | None) -> None:
        super().__init__(f"{what} needs {package or 'packages'}: pip install 'kvweave[{extra}]'", name=package)

    @classmethod
    @contextmanager
    def on_import(cls, what: str, extra: str) -> Iterator[None]:
        """Imports within belong to `extra`: one that is not installed raises this error. Of nested contexts the
        outermost names the extra: it knows what the user asked for."""
        try:
            yield
        except (ModuleNotFoundError, cls) as error:
            raise cls(what, extra, error.name) from error


class NotBuilt(KVWeaveError, ImportError):
    """A C extension was not built when kvweave was installed."""

    def __init__(self, what: str, error: ImportError) -> None:
        super().__init__(
            f"{what} needs a C extension of kvweave that was not built ({error}): install kvweave again with a"
            " C compiler and without KVWEAVE_PURE"
        )


class CannotServe(KVWeaveError, ValueError):
    """A model's cache cannot be kept in pages."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} cannot be served: {reason}")
        self.model, self.reason = model, reason
