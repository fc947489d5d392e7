"""Sequences: the handles that a cache gives out, and the rows of arrays behind them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.cache.row_counters import RowCounters
from kvweave.errors import BadSequence
from kvweave.pool import Ids
from kvweave.prefix import NEVER, Node, PastUse, Point, StatePages, Tokens

Rows = NDArray[np.int64]


class SequenceOwner:
    """What a sequence asks of the cache that it is in."""

    def __init__(self, counters: RowCounters, state_tags: list[str]) -> None:
        self.counters = counters
        self.state_tags = state_tags

    def flush_tokens(self, sequence: Sequence) -> None:
        raise NotImplementedError

    def close(self, sequence: Sequence, *, keep: bool = True) -> None:
        raise NotImplementedError


class Checkpoint(NamedTuple):
    """The step just prepared should leave the state after `position` tokens in `page` of a group."""

    tag: str
    position: int
    page: int


COMMON_NAMES = (
    "asked_points branch expected_branches drop_last_blocks given_points owner last_point namespace node num_cached"
    " num_prompt priority private_from prompt_points remembered restore"
)
OWN_NAMES = "_buffer _first _num_tokens answer copy_at in_step retained row rows snapshots next_key tip"
INHERITED = tuple(COMMON_NAMES.split())
FIELDS = (*INHERITED, *OWN_NAMES.split())
"""What makes up a sequence: what its forks have in common with it, and what is its own."""


class Sequence:
    """One sequence of a cache. `num_cached` of its tokens were found; compute the rest.

    `stop` is the next length at which the cache wants the state of a prompt: extend no further than that, commit, go
    on. Kernels that can write states on the way need not stop: `extend` with `checkpoints` says where they go.
    """

    def __init__(
        self, owner: SequenceOwner, row: int, tokens: Tokens, namespace: Hashable, priority: int, node: Node
    ) -> None:
        self.owner = owner
        self.row = row
        self.rows: Rows = np.array([row], np.int64)
        self.namespace = namespace
        self.priority = priority
        self.num_prompt = len(tokens)
        self.num_cached = node.end
        self.node = node
        self.branch = 0
        """Where it left the path of an earlier one."""
        self.expected_branches: list[int] = []
        """Where others that are to come leave its path, on the grid."""
        self.remembered: dict[int, PastUse] = {}
        """By position, ascending: points of its prompt that would have been hit if nothing had been evicted."""
        self.drop_last_blocks = 0
        self.given_points: list[int] | None = None
        """Where the caller wants resume points, if not where the retention does."""
        self.prompt_points: list[int] = []
        """Positions of its prompt at which a resume point is wanted, ascending. Forks share the list: replace it."""
        self.asked_points: list[int] = []
        """Those of them that are not there by the retention's spacing alone."""
        self.last_point = 0
        """The last position at which the prompt could leave a point; 0 where its points are in the tree."""
        self.snapshots: dict[int, StatePages] = {}
        """State pages by position, ascending, not in the tree yet: states that steps leave, true once they are
        committed."""
        self.in_step: list[int] = []
        """Those of them that a step leaves itself, the last one that left any."""
        self.copy_at = -1
        """The position of the one that is to be copied from the live state, when it is there."""
        self.answer = -1
        """The position of the last one taken while generating, of which all is kept that resuming there needs."""
        self.private_from = NEVER
        """What is written from this length on is never shared."""
        self.restore: Point | None = None
        """The point whose states are to be copied into the live ones before the first step."""
        self.tip: Point | None = None
        """The last point it left while generating; the next one takes its place."""
        self.retained: dict[int, list[tuple[int, Ids]]] = {}
        """By group number: pages of a window that it has passed and that points not in the tree yet need, as runs from
        a block on."""
        self.next_key = b""
        """Its key in `Node.running`."""
        self._first = 0
        self._buffer = tokens
        self._num_tokens = len(tokens)

    def start_at(self, position: int, tokens: Tokens) -> None:
        """Its tokens before `position` are in the tree; the others it keeps: the caller's array is the caller's."""
        self._first = position
        self._buffer = tokens[position:].copy()
        self._num_tokens = len(tokens)

    def fork(self, row: int) -> Sequence:
        """A sequence in another row with the same past, of which it keeps the tokens that are not in the tree."""
        first, known = self.node.end, self.num_tokens
        child = Sequence(self.owner, row, self.run(first, known).copy(), self.namespace, self.priority, self.node)
        for name in INHERITED:
            setattr(child, name, getattr(self, name))
        child._first, child._num_tokens = first, known
        return child

    def check_open(self) -> None:
        if self.row < 0:
            raise BadSequence("the sequence is closed")

    @property
    def is_open(self) -> bool:
        return self.row >= 0

    @property
    def can_take_states(self) -> bool:
        """Whether the states of its hit, not copied yet, are needed by nobody else, so that they need no copy."""
        return self.restore is not None and self.restore.pins == 1

    @property
    def length(self) -> int:
        """Tokens with pages allocated: cached, computed, or in a step that is under way."""
        self.check_open()
        return self.owner.counters.length_of[self.row]

    @property
    def committed(self) -> int:
        """Tokens whose KV is written and may be shared."""
        self.check_open()
        return min(self.owner.counters.committed_of[self.row], self.private_from)

    @property
    def stop(self) -> int | None:
        length = self.length
        stop = self.next_point(length) if self.owner.state_tags else NEVER
        return None if stop == NEVER else stop

    def next_point(self, position: int) -> int:
        """The first wanted point of the prompt after `position`, or `NEVER`."""
        at = bisect_right(self.prompt_points, position)
        return self.prompt_points[at] if at < len(self.prompt_points) else NEVER

    def points_in(self, start: int, end: int) -> list[int]:
        """All wanted points of the prompt in (start, end], ascending."""
        return self.prompt_points[bisect_right(self.prompt_points, start) : bisect_right(self.prompt_points, end)]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Where the step just prepared should leave states, after `extend` with `checkpoints`."""
        tags, start = self.owner.state_tags, self.owner.counters.step_start_of[self.row]
        return [
            Checkpoint(tag, position, page)
            for position in self.in_step
            if position > start and position in self.snapshots
            for tag, page in zip(tags, self.snapshots[position], strict=True)
        ]

    @property
    def tokens(self) -> Tokens:
        """All tokens known so far: the prompt, and those given to `extend` and `commit`."""
        self.check_open()
        num_tokens = self.num_tokens
        cached = np.concatenate([*(node.tokens for node in self.node.path()), self._buffer[:0]])[: self._first]
        return np.concatenate([cached, self.run(self._first, num_tokens)])

    @property
    def num_tokens(self) -> int:
        """How many tokens are known."""
        self.owner.flush_tokens(self)
        return self._num_tokens

    def run(self, start: int, end: int) -> Tokens:
        """The tokens [start, end), which the sequence keeps itself: those after its hit."""
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

    def close(self) -> None:
        """`Cache.close`, unless it is closed already."""
        if self.row >= 0:
            self.owner.close(self)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"row {self.row}, {self.length} tokens" if self.is_open else "closed"
        return f"<Sequence {state}, {self.num_cached} cached>"


class Pin:
    """A prefix that is kept until `Cache.unpin`: its length in tokens, and the point where it ends."""

    def __init__(self, owner: SequenceOwner, point: Point) -> None:
        self.owner: SequenceOwner | None = owner
        self.point = point

    @property
    def length(self) -> int:
        return self.point.position


class Batch:
    """Several sequences as one array of rows, made once and used for many steps."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        try:
            self.sequences = list(sequences)
            owner = self.sequences[0].owner if self.sequences else None
            rows = [sequence.row for sequence in self.sequences if sequence.owner is owner]
        except (AttributeError, TypeError):
            raise BadSequence(f"a batch is of sequences, not {sequences!r:.80}") from None
        self.rows: Rows = np.array(rows, np.int64)
        self.owner = owner if len(rows) == len(self.sequences) else None
        """The cache that all of them are in, if there is one."""
        self._generations = self.rows if owner is None else owner.counters.generation[self.rows]
        self.checked = -1
        """The cache's count of closed sequences when it last looked at this batch."""

    def check(self, owner: SequenceOwner) -> None:
        """All sequences are open ones of this cache, each once, where they were when the batch was made."""
        if not self.sequences:
            raise BadSequence("no sequence is in the batch")
        if self.owner is not owner:
            raise BadSequence("a sequence of another cache is in the batch")
        if self.rows.min() < 0 or (owner.counters.generation[self.rows] != self._generations).any():
            raise BadSequence("a sequence of the batch is closed, or was reordered since: make a new batch")
        if np.count_nonzero(np.bincount(self.rows)) < len(self.rows):
            raise BadSequence("a sequence is twice in the batch")


Sequences = Sequence | Batch | Iterable[Sequence]
"""What calls for one sequence or for many take."""
