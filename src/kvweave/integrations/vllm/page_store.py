"""Pages of vLLM's host memory in a store, under keys of its own: for its native offloading."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvweave.integrations.keyed_pages import page_prompt, promised
from kvweave.store import BaseStore, HashedPrompt, Namespace, Operation, Shard
from kvweave.store.keys import Bytes


class PageJob(NamedTuple):
    """A job that has ended: how many of its pages were moved, from the first on."""

    number: int
    num_pages: int
    num_moved: int
    seconds: float


class _Question(NamedTuple):
    """A lookup, and for each of its prompts the keys and where their answers belong."""

    operation: Operation[list[Any]]
    asked: list[tuple[list[bytes], dict[bytes, bool | None]]]


class PageStore:
    """Moves rows of `pages` (`[pages, bytes]`) by the store's threads. No call waits but `drain`."""

    def __init__(self, store: BaseStore[Any], namespace: Namespace, pages: Bytes) -> None:
        self._store, self._pages, self._namespace = store, pages, namespace
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        """By request: None where the store has not answered yet."""
        self._unasked: dict[str, list[bytes]] = {}
        self._questions: list[_Question] = []
        self._jobs: dict[int, tuple[Operation[Any], int, float]] = {}

    def _prompt(self, keys: Sequence[bytes]) -> HashedPrompt:
        return page_prompt(keys, self._namespace)

    def has(self, key: bytes, request: str) -> bool | None:
        """Whether the store has a page; None: `ask` sends the question, ask again after it. An answer is for one
        request: to the next one, a page that was missing may be stored."""
        self._take_answers()
        mine = self._answers.setdefault(request, {})
        if key not in mine:
            mine[key] = None
            self._unasked.setdefault(request, []).append(key)
        elif mine[key]:
            del mine[key]  # a page that is asked for again was promoted, and is gone from the engine's memory
            return True
        return mine[key]

    def ask(self) -> None:
        """Ask the store for all keys that were wanted since the last call: one lookup, and one prompt a request."""
        if not self._unasked:
            return
        asked = [(keys, self._answers[request]) for request, keys in self._unasked.items()]
        self._unasked = {}
        operation = self._store.submit_lookup([self._prompt(keys) for keys, _ in asked], lease=False)
        self._questions.append(_Question(operation, asked))

    def _take_answers(self) -> None:
        for question in [each for each in self._questions if each.operation.is_done]:
            self._questions.remove(question)
            operation = question.operation
            hits = operation.result(0) if operation.error is None else [None] * len(question.asked)
            for (keys, answers), hit in zip(question.asked, hits, strict=True):
                answers.update(zip(keys, hit.present[0].tolist() if hit else [False] * len(keys), strict=True))

    def forget(self, request: str) -> None:
        """A request has ended: answers that it never took are of no use."""
        self._answers.pop(request, None)
        self._unasked.pop(request, None)

    def save(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store these rows; they must not change until the job has ended."""

        def source(shard: Shard, chunk: int) -> Bytes:  # noqa: ARG001 - there is one
            page: Bytes = self._pages[rows[chunk]]
            return page

        self._begin(number, len(keys), self._store.submit_save(self._prompt(keys), source, request=number))

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Fill these rows. Of what is gone meanwhile nothing is written, and nothing behind it."""

        def sink(shard: Shard, chunk: int, payload: Bytes) -> None:  # noqa: ARG001
            self._pages[rows[chunk]] = payload

        hit = promised(self._store, self._prompt(keys))
        self._begin(number, len(keys), self._store.submit_load(hit, sink, request=number))

    def _begin(self, number: int, num_pages: int, operation: Operation[Any]) -> None:
        self._jobs[number] = operation, num_pages, time.monotonic()

    def take_ended(self) -> list[PageJob]:
        """The jobs that have ended since the last call."""
        ended = []
        for number in [number for number, (operation, *_) in self._jobs.items() if operation.is_done]:
            operation, num_pages, began = self._jobs.pop(number)
            moved = 0
            if operation.error is None:
                moved = operation.result(0) if operation.kind == "load" else num_pages - len(operation.failed)
            ended.append(PageJob(number, num_pages, moved, time.monotonic() - began))
        self._store.poll()
        return ended

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def drain(self) -> None:
        """Wait until every job has ended."""
        while any(not operation.is_done for operation, *_ in self._jobs.values()):
            time.sleep(0.001)
