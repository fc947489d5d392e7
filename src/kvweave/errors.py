"""What can go wrong, as one tree.

    KVWeaveError
    +-- SpecError            a declaration contradicts itself
    |   +-- UnknownName      a name (dtype, reach, key) that nobody declared; says the nearest known one
    +-- ConfigError          a config.json cannot be read, or lacks what its layers need
    +-- PlanError            memory cannot be cut as asked
        +-- NeverFits        not even an empty pool of this size would hold it; says what would; a CacheError too
        +-- DraftMismatch    a draft model's caches match no group of the target
            +-- AmbiguousDraft   ... or match several
    +-- CacheError           a cache cannot do what was asked of it
        +-- OutOfPages       not now: which groups lack pages, who does not fit, who could be preempted; later, yes
        +-- BadOption        an argument of a cache, a retention or a simulation that makes no sense
        +-- BadTokens        a prompt that is no list of token ids
        +-- BadSequence      a sequence of another cache, a closed one, lengths that make no sense
        +-- NotSettled       steps in flight, drafts or copies are outstanding; says what to do first
        +-- CannotTruncate   what the shorter sequence would need is gone
        +-- BadCall          a model was called in a way that pages cannot follow
        +-- WrongThread      a cache belongs to the thread that made it
    +-- TensorError          memory cannot be had, or be used as asked
        +-- OutOfMemory      the machine has not so many bytes; nothing stays allocated
        +-- NoDevice         the device asked for is not here
        +-- ArenaClosed      memory that was given back already
        +-- BadRows          rows, slots or pages that do not fit the cache they are for
        +-- NoKernel         attention over a layer's pages that a backend cannot compute, with the reason
    +-- TraceError           a trace cannot be read, or not be replayed as asked
        +-- LengthsOnly      it says how long requests were, not what they share: no claim of reuse can be made
    +-- MissingExtra         a part of kvweave needs packages that are not installed; says how to get them
    +-- NotBuilt             a part of kvweave in C was not built where it was installed; says what to do
    +-- CannotServe          a model whose past cannot be kept in pages, with the reason
    +-- QueueFull            an engine has as many requests under way as it may have; later, yes
    +-- OperationCancelled   what was submitted was cancelled before it was done
    +-- OperationTimeout     what was submitted is not done yet; it goes on, and may be waited for again
    +-- TransferError        pages cannot be moved
        +-- BadCopy          pages, chunks, buffers or layouts that do not fit together; nothing moved
        +-- TransferFailed   it broke on the way; what it was to fill holds nothing of use
        +-- TransferCancelled  somebody cancelled it; likewise. An OperationCancelled, too
        +-- TransferTimeout  it is not done yet. An OperationTimeout, too
    +-- StoreError           a store cannot be had, or be used as asked
        +-- TierError        a tier failed at something; the others go on
            +-- TierFull     its disk or server has no room, whatever its quota says
            +-- ReadOnly     it can be read, but not be written
            +-- Busy         another process owns its directory
            +-- Unreadable   bytes that it holds cannot be read: lost, and removed
            +-- PartlyRead   some of what it was asked for is unreadable; the rest is there
            +-- Vanished     somebody removed its directory: it must be opened anew
        +-- ServerError      the daemon said no
            +-- ServerGone   nobody answers at its socket
                +-- ServerTimeout  it is there, but did not answer in time: slow, or frozen
            +-- Refused      it will not talk to this client: version, token, user
            +-- BadRequest   it cannot do what was asked: damaged, unknown, foreign, not on this kind of connection
            +-- OverLimit    more than one message, or one connection, may ask for
            +-- LeaseExpired what was reserved was given back meanwhile; nothing became visible

    KVWeaveWarning           something works, but hardly as it was meant
    +-- CoarseReuse          a plan whose groups' blocks seldom end together, so that few prefixes can be reused
    +-- PolicyFailed         a user's eviction policy raised, or answered what has no order: LRU decides from then on

Every message carries the numbers and the cure; an error leaves everything as it was.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class KVWeaveError(Exception):
    """Base of all errors that kvweave raises on purpose."""


class KVWeaveWarning(UserWarning):
    """Base of all warnings of kvweave."""


class CoarseReuse(KVWeaveWarning):
    """Blocks of a plan's groups seldom end at the same token, so prefixes are reused in large steps only."""


class PolicyFailed(KVWeaveWarning):
    """A user's eviction policy raised, or answered what has no order: LRU decides from then on."""


class SpecError(KVWeaveError, ValueError):
    """A declaration contradicts itself."""


class UnknownName(SpecError):
    """A name nobody declared."""

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
    """Not enough pages now; when sequences close, there will be. Nothing was evicted or changed.

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
            f"pool {pool!r}: {lacking}; {len(sequences)} sequences of the call do not fit: close or preempt a sequence"
        )
        self.pool, self.shortages = pool, tuple(shortages)
        self.sequences, self.preemptible = tuple(sequences), tuple(preemptible)


class BadOption(CacheError, ValueError):
    """An argument of a cache, a retention or a simulation that makes no sense."""


class BadTokens(CacheError, ValueError):
    """A prompt that is no list of token ids."""


class BadSequence(CacheError, ValueError):
    """A sequence of another cache, a closed one, or a length that makes no sense."""


class NotSettled(CacheError, RuntimeError):
    """Steps in flight, drafts or copies are outstanding, so this cannot be done yet."""


class CannotTruncate(CacheError, ValueError):
    """What the shorter sequence would need is gone: open it again from its tokens."""


class BadCall(CacheError, ValueError):
    """A model was called, or was changed, in a way that pages cannot follow; nothing was cached."""


class WrongThread(CacheError, RuntimeError):
    """A cache belongs to the thread that made it."""


class TensorError(KVWeaveError):
    """Memory cannot be had, or cannot be used as asked."""


class OutOfMemory(TensorError, MemoryError):
    """The machine has not so many bytes; nothing of what was asked for stays allocated."""

    def __init__(self, where: str, *, wanted_bytes: int, reason: str) -> None:
        super().__init__(f"{where}: cannot have {wanted_bytes} bytes ({reason}); plan with less memory")
        self.wanted_bytes = wanted_bytes


class NoDevice(TensorError, RuntimeError):
    """The device asked for is not here."""


class ArenaClosed(TensorError, RuntimeError):
    """The memory was given back already."""


class BadRows(TensorError, ValueError):
    """Rows, slots or pages that do not fit the cache they are for; nothing was written."""


class NoKernel(TensorError, ValueError):
    """A backend cannot attend to a layer's pages."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} cannot be attended to in its pages: {reason}")
        self.reason = reason


class StoreError(KVWeaveError):
    """A store cannot be had, or cannot be used as asked."""


class TierError(StoreError):
    """A tier failed at something: for its reader a miss, for its writer nothing was stored."""


class TierFull(TierError):
    """A tier's disk or server has no room, whatever its quota says; what it holds is still served."""


class ReadOnly(TierError):
    """A tier can be read, but not be written."""


class Busy(TierError):
    """A tier's directory belongs to another process, which is running."""


class Unreadable(TierError):
    """Bytes that a tier holds cannot be read, and never will be."""


class PartlyRead(TierError):
    """Some of what a tier was asked for could not be read, and was removed; `answer` is what its reader gets."""

    def __init__(self, message: str, answer: object) -> None:
        super().__init__(message)
        self.answer = answer


class Vanished(TierError):
    """A tier's directory was removed, or is another one by now; it must be opened anew."""


class ServerError(StoreError):
    """The daemon said no; nothing was changed."""


class ServerGone(ServerError):
    """Nobody answers at the daemon's socket, or not in time."""


class ServerTimeout(ServerGone):
    """The daemon did not answer in time: it is slow, or frozen. The connection is kept; a late answer is dropped."""


class Refused(ServerError):
    """The daemon will not talk to this client."""


class BadRequest(ServerError):
    """A message that is damaged, refers to what is not there, or may not come over this kind of connection."""


class OverLimit(ServerError):
    """More than one message, or one connection, may ask for."""


class LeaseExpired(ServerError):
    """What was reserved was given back meanwhile; nothing of it became visible."""


class QueueFull(KVWeaveError):
    """An engine has as many requests under way as it may have; when some are answered, there is room."""


class OperationCancelled(KVWeaveError):
    """What was submitted was cancelled: it did what it did, and does no more."""


class OperationTimeout(KVWeaveError, TimeoutError):
    """What was submitted is not done yet. It goes on, and may be waited for again."""


class TransferError(KVWeaveError):
    """Pages cannot be moved."""


class BadCopy(TransferError, ValueError):
    """Pages, chunks, buffers or layouts that do not fit one another; nothing was moved."""


class TransferFailed(TransferError, RuntimeError):
    """A transfer broke on the way: what it was to fill holds nothing of use."""


class TransferCancelled(TransferError, OperationCancelled):
    """A transfer was cancelled: what it was to fill holds nothing of use."""


class TransferTimeout(TransferError, OperationTimeout):
    """A transfer is not done yet. It goes on, and may be waited for again."""


class TraceError(KVWeaveError, ValueError):
    """A trace cannot be read, or cannot be replayed as asked."""


class LengthsOnly(TraceError):
    """A trace says how long its requests were and nothing of what they share."""


class MissingExtra(KVWeaveError, ImportError):
    """A part of kvweave needs packages that are not installed."""

    def __init__(self, what: str, extra: str, package: str | None) -> None:
        super().__init__(f"{what} needs {package or 'packages'}: pip install 'kvweave[{extra}]'", name=package)


class NotBuilt(KVWeaveError, ImportError):
    """A part of kvweave that is written in C was not built."""

    def __init__(self, what: str, error: ImportError) -> None:
        super().__init__(
            f"{what} needs a part of kvweave in C that was not built ({error}): install kvweave again, where there is a"
            " C compiler and without KVWEAVE_PURE"
        )


class CannotServe(KVWeaveError, ValueError):
    """A model whose past cannot be kept in pages."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} cannot be served: {reason}")
        self.model, self.reason = model, reason
