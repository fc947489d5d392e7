"""Sequences: the handles that a cache gives out, and the rows of arrays behind them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadSequence
from kvweave.pool import Ids
from kvweave.prefix import Node, Tokens
from kvweave.prefix.node import Snapshots

Rows = NDArray[np.int64]


class Home(Protocol):
    """What a sequence asks of the books that it is in."""

    lengths: Rows

    @property
    def state_tags(self) -> list[str]: ...
    def next_stop(self, sequence: Sequence, position: int) -> int | None: ...
    def flush_tokens(self, sequence: Sequence) -> None: ...


class Copy(NamedTuple):
    """Pages of a group to be copied, `src` to `dst`, before the next step; copies are carried out in order."""

    tag: str
    src: Ids
    dst: Ids


class Checkpoint(NamedTuple):
    """The step just prepared should leave the state after `position` tokens in `page` of a group."""

    tag: str
    position: int
    page: int


FIELDS = (
    "_buffer",
    "_first",
    "_num_tokens",
    "books",
    "branch",
    "in_step",
    "namespace",
    "node",
    "num_cached",
    "num_prompt",
    "planned",
    "points",
    "priority",
    "restore",
    "row",
    "rows",
    "snapshots",
    "spaced_end",
)
"""What makes up a sequence."""


class Sequence:
    """One sequence of a cache. `num_cached` of its tokens were found; compute the rest.

    `stop` is the next length at which the cache wants a state snapshot: extend no further than that, commit, go on.
    Kernels that can write states on the way need not stop: `extend` with `checkpoints` says where they go.
    """

    __slots__ = FIELDS

    def __init__(self, books: Home, row: int, tokens: Tokens, namespace: Hashable, priority: int, node: Node) -> None:
        self.books = books
        self.row = row
        self.rows: Rows = np.array([row], np.int64)
        self.planned: dict[int, tuple[int, ...]] = {}
        """State pages, one a group of states, by the position whose state they will hold when the step is over."""
        self.in_step = False
        """Whether the step itself leaves the states there; if not, the one at its end is copied from the live one."""
        self.namespace = namespace
        self.priority = priority
        self.num_prompt = len(tokens)
        self.num_cached = node.end
        self.node = node
        self.branch = 0
        self.points: list[int] = []
        """Positions at which a resume point is wanted, ascending: nodes of the tree."""
        self.spaced_end = 0
        """Before this, points are welcome where the retention spaces them: extras of a node."""
        self.snapshots: Snapshots = {}
        """Not in the tree yet."""
        self.restore: tuple[int, ...] = ()
        """The snapshot, a page a group of states, to be copied into the live states before the first step."""
        self._first = node.end
        self._buffer = tokens[node.end :].copy()  # what is before is in the tree; the caller's array is the caller's
        self._num_tokens = len(tokens)

    def _check_open(self) -> None:
        """Row -1 would be somebody else's."""
        if not self.is_open:
            raise BadSequence("the sequence is closed")

    @property
    def is_open(self) -> bool:
        return self.row >= 0

    @property
    def length(self) -> int:
        """Tokens that have a place: cached, computed, or about to be."""
        self._check_open()
        return int(self.books.lengths[self.row])

    @property
    def stop(self) -> int | None:
        return self.books.next_stop(self, self.length)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Where the step prepared should leave states, at its end too, after `extend` with `checkpoints`."""
        return [
            Checkpoint(tag, position, page)
            for position, pages in self.planned.items()
            for tag, page in zip(self.books.state_tags, pages, strict=True)
            if self.in_step
        ]

    @property
    def tokens(self) -> Tokens:
        """All tokens known so far: the prompt, and what `extend` was told."""
        self._check_open()
        num_tokens = self.num_tokens
        cached = np.concatenate([*(node.tokens for node in self.node.path()), self._buffer[:0]])[: self._first]
        return np.concatenate([cached, self.run(self._first, num_tokens)])

    @property
    def num_tokens(self) -> int:
        """How many tokens are known."""
        self.books.flush_tokens(self)
        return self._num_tokens

    def run(self, start: int, end: int) -> Tokens:
        """The tokens [start, end) of those that the sequence was told, from where it stood in the tree at first."""
        return self._buffer[start - self._first : end - self._first]

    def add_tokens(self, tokens: Tokens) -> None:
        have = self._num_tokens - self._first
        need = have + len(tokens)
        if need > len(self._buffer):
            larger = np.empty(max(need, 2 * have, 64), np.int32)
            larger[:have] = self._buffer[:have]
            self._buffer = larger
        self._buffer[have:need] = tokens
        self._num_tokens += len(tokens)

    def cut_tokens(self, length: int) -> None:
        self._num_tokens = min(self._num_tokens, length)

    def __repr__(self) -> str:
        state = f"row {self.row}, {self.length} tokens" if self.is_open else "closed"
        return f"<Sequence {state}, {self.num_cached} cached>"


class Pin:
    """A prefix that is kept until `Cache.unpin`: its length in tokens, and where it ends."""

    __slots__ = ("books", "node")

    def __init__(self, books: Home, node: Node) -> None:
        self.books: Home | None = books
        self.node = node

    @property
    def length(self) -> int:
        return self.node.end


class Batch:
    """Several sequences as one array of rows, made once and used for many steps."""

    __slots__ = ("checked", "rows", "sequences")

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self.sequences = list(sequences)
        self.rows: Rows = np.fromiter((s.row for s in self.sequences), np.int64, len(self.sequences))
        self.checked = -1
        """The cache's count of closed sequences when it last looked at this batch."""

    def check(self, books: Home) -> None:
        """All sequences are open ones of these books, each once, where they were when the batch was made."""
        for sequence, row in zip(self.sequences, self.rows.tolist(), strict=True):
            if sequence.books is not books:
                raise BadSequence("a sequence of another cache is in the batch")
            if row < 0 or sequence.row != row:
                raise BadSequence("a sequence of the batch is closed, or was reordered since: make a new batch")
        if len(set(self.rows.tolist())) != len(self.rows):
            raise BadSequence("a sequence is twice in the batch")
