"""The methods of every store that never wait: submit, poll, cancel."""

from __future__ import annotations

import operator
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.operation import AnyOperation, Completions
from kvweave.store.forking import register_after_fork
from kvweave.store.histogram import Histogram
from kvweave.store.keys import HashedPrompt
from kvweave.store.operations import ChunkRef, Operation, OperationQueue
from kvweave.store.page_payloads import Sink, Source
from kvweave.store.removals import FROM_NOW, Removals
from kvweave.store.results import BaseHit, Saved, SaveOutcome
from kvweave.store.shards import Schema
from kvweave.store.tier_stack import Budget

Found = TypeVar("Found", bound=BaseHit)
Result = TypeVar("Result")
LATENCIES = ("lookup", "load", "save")


def whole_numbers(what: str, given: Sequence[int]) -> list[int]:
    """These numbers, of an array, too. Raises `StoreError` for others, and for what can be read once only: its second
    reader would find nothing, and what was not read would pass for done."""
    try:
        numbers = [operator.index(number) for number in given] if isinstance(given, Collection) else None
    except TypeError:
        numbers = None
    if numbers is None:
        raise StoreError(f"{what} must be a list of whole numbers, got {given!r}")
    return numbers


class SubmittingStore(ABC, Generic[Found]):
    """Lookups, loads and saves in threads of the store."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._operations = OperationQueue()
        self._latency = {kind: Histogram() for kind in LATENCIES}
        self._lock = threading.Lock()
        register_after_fork(self)

    @overload
    def submit_lookup(
        self,
        prompts: Sequence[HashedPrompt],
        *,
        request: Hashable = None,
        shards: Sequence[int] | None = None,
        lease: bool = True,
        budget_s: float | None = None,
    ) -> Operation[list[Found]]: ...

    @overload
    def submit_lookup(
        self,
        prompts: Sequence[HashedPrompt],
        *,
        then: Callable[[Found], Result],
        request: Hashable = None,
        shards: Sequence[int] | None = None,
        lease: bool = True,
        budget_s: float | None = None,
    ) -> Operation[list[Result]]: ...

    def submit_lookup(
        self,
        prompts: Sequence[HashedPrompt],
        *,
        then: Callable[[Found], Any] = lambda hit: hit,
        request: Hashable = None,
        shards: Sequence[int] | None = None,
        lease: bool = True,
        budget_s: float | None = None,
    ) -> Operation[list[Any]]:
        """Look up several prompts together; returns at once. The results are the hits, or what `then` makes of them in
        the store's thread. `shards` and `lease` are for stores that lease."""
        operation: Operation[list[Any]] = self._operations.new("lookup", request, budget_s)

        def work() -> tuple[list[Any], list[ChunkRef]]:
            hits = self._lookup_all(prompts, shards, operation.budget, lease=lease)
            is_taken = False
            try:
                results = [then(hit) for hit in hits]
                is_taken = not operation.budget.is_cancelled
            finally:
                for hit in hits if not is_taken else ():
                    self.release(hit)
            return results, []

        self._operations.submit(operation, work)
        return operation

    @abstractmethod
    def _lookup_all(
        self, prompts: Sequence[HashedPrompt], shards: Sequence[int] | None, budget: Budget, *, lease: bool
    ) -> list[Found]: ...

    def submit_removed(self, after: int = FROM_NOW, *, budget_s: float | None = None) -> Operation[Removals]:
        """Ask which keys, of all that were stored, have left the last tier since the number `after`; returns at once.
        `FROM_NOW`: for the number to begin with. Tiers on other servers (Redis, buckets) do not tell. If a tier does
        not answer in time, the result has no keys and the same number: ask again."""
        operation: Operation[Removals] = self._operations.new("lookup", None, budget_s)
        self._operations.submit(operation, lambda: (self._removed(after, operation.budget), []))
        return operation

    @abstractmethod
    def _removed(self, after: int, budget: Budget) -> Removals: ...

    def submit_load(
        self,
        hit: Found,
        sink: Sink,
        *,
        start: int = 0,
        shards: Sequence[int] | None = None,
        request: Hashable = None,
        budget_s: float | None = None,
    ) -> Operation[int]:
        """`load`, in a thread of the store's, which calls `sink`; returns at once. Shards are passed one after the
        other, in the order of `shards`: `Operation.has_shard` says which are complete."""
        operation: Operation[int] = self._operations.new("load", request, budget_s)

        def work() -> tuple[int, list[ChunkRef]]:
            self._check_start(hit.prompt, start)
            operation.expect(self._needs(hit.position, self._shard_numbers(shards), hit.present, start))
            self._begin("load", operation.budget)
            position = self._load(hit, sink, start, shards, operation.budget, operation.arrived)
            return position, operation.missing

        self._operations.submit(operation, work)
        return operation

    def submit_save(
        self,
        prompt: HashedPrompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        start: int = 0,
        request: Hashable = None,
        budget_s: float | None = None,
    ) -> Operation[Saved]:
        """`save`, in a thread of the store's, which asks `source`; returns at once. The source's memory is in use until
        `Operation.is_gathered`. If too many saves are queued, it has ended on return, and everything is dropped."""
        operation: Operation[Saved] = self._operations.new("save", request, budget_s)

        def work() -> SaveOutcome:
            self._begin("save", operation.budget)
            pieces = self._to_keep(prompt, source, points, shards, start)
            return self._timed_save(prompt, source, pieces, operation.budget, operation.gathered)

        def drop() -> SaveOutcome:
            pieces = self._to_keep(prompt, source, points, shards, start)
            return SaveOutcome(Saved(dropped=len(pieces)), pieces)

        if not self._operations.submit(operation, work):
            operation.run(drop)
        return operation

    def poll(self) -> list[AnyOperation]:
        """Operations of all kinds that ended since the last call, in whatever state, each once. Never waits. Transfers
        that are added to `completions` are reported here, too."""
        return self._operations.completions.poll()

    @property
    def completions(self) -> Completions:
        return self._operations.completions

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock does not exist."""
        self._lock = threading.Lock()
        self._operations.after_fork()

    def _shard_numbers(self, shards: Sequence[int] | None) -> Sequence[int]:
        """Raises `StoreError` for a number that no shard has: what is not read would pass for loaded."""
        count = len(self.schema.shards)
        if shards is None:
            return range(count)
        numbers = whole_numbers("shards", shards)
        if any(not 0 <= number < count for number in numbers):
            raise StoreError(f"shards {sorted(numbers)}: this store's are 0 to {count - 1}")
        return numbers

    def _check(self, prompt: HashedPrompt) -> None:
        """Raises `StoreError` if a prompt was not hashed for this store."""
        if not isinstance(prompt, HashedPrompt):
            raise StoreError(f"a prompt is what `store.prompt` makes of tokens, not {type(prompt).__name__}")
        theirs, own = prompt.chunk_tokens, self.schema.chunk_tokens
        if theirs != own:
            raise StoreError(
                f"the prompt is hashed in chunks of {theirs} tokens, the store has {own}: hash it with `store.prompt`"
            )

    @staticmethod
    def _check_start(prompt: HashedPrompt, start: int) -> None:
        """Raises `StoreError` for a start that a prompt does not have. A refused ticket is a miss at any start: it has
        no tokens."""
        if start < 0 or 0 < prompt.num_tokens < start:
            raise StoreError(f"start {start}: the prompt has {prompt.num_tokens} tokens; a start is one of them, or 0")

    # ---- run in these threads

    def _begin(self, kind: str, budget: Budget) -> None:
        """Called in its thread before a submitted load or save."""

    def _timed_save(
        self,
        prompt: HashedPrompt,
        source: Source,
        pieces: Sequence[ChunkRef],
        budget: Budget,
        gathered: Callable[[], None],
    ) -> SaveOutcome:
        began = time.monotonic()
        outcome = self._save(prompt, source, pieces, budget, gathered)
        self._took("save", time.monotonic() - began, prompt)
        return outcome

    def _took(self, kind: str, seconds: float, prompt: HashedPrompt) -> None:  # noqa: ARG002 - reported to a daemon
        """Record how long a load or a save took."""
        self._latency[kind].observe(seconds)

    @abstractmethod
    def release(self, hit: Found, *, budget_s: float | None = None) -> None: ...

    @abstractmethod
    def _load(
        self,
        hit: Found,
        sink: Sink,
        start: int,
        shards: Sequence[int] | None,
        budget: Budget,
        arrived: Callable[[ChunkRef], None],
    ) -> int: ...

    @abstractmethod
    def _save(
        self,
        prompt: HashedPrompt,
        source: Source,
        pieces: Sequence[ChunkRef],
        budget: Budget,
        gathered: Callable[[], None],
    ) -> SaveOutcome:
        """Calls `gathered` when everything is copied out of the source, if that is before the end."""

    @abstractmethod
    def _needs(
        self, position: int, shards: Sequence[int] | range, present: NDArray[np.bool_], start: int = 0
    ) -> Iterator[ChunkRef]: ...

    @abstractmethod
    def _to_keep(
        self,
        prompt: HashedPrompt,
        source: Source,
        points: Sequence[int] | None,
        shards: Sequence[int] | None,
        start: int,
    ) -> list[ChunkRef]: ...
