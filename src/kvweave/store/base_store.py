"""The methods of every store that never wait: submit, poll, cancel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, overload

from kvweave.operation import AnyOperation, Completions
from kvweave.store.blocking_store import BlockingStore, Found
from kvweave.store.keys import HashedPrompt
from kvweave.store.operations import ChunkRef, Operation
from kvweave.store.page_payloads import Sink, Source
from kvweave.store.removals import FROM_NOW, Removals
from kvweave.store.results import Saved, SaveOutcome
from kvweave.store.tier_stack import Budget

Result = TypeVar("Result")


class BaseStore(BlockingStore[Found]):
    """The KV of one model's chunks. Thread-safe."""

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

    # ---- run in these threads

    def _begin(self, kind: str, budget: Budget) -> None:
        """Called in its thread before a submitted load or save."""
