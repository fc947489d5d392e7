"""The cache: open, extend, commit, accept, fork, truncate, close. It needs numpy and no other library.

The life of a sequence, and the owner of its pages:

    open      the longest joint hit is matched and pinned; its pages enter the block tables of the sequence's row
    load_to   after `open`, for KV computed elsewhere: pages that the caller fills
    extend    pages for the next tokens are allocated; the sequence owns them
    accept    rejected draft tokens are dropped
    commit    KV written so far may be shared: other prompts find it; windows free the blocks they have passed
    close     uncommitted pages are freed, and the prefix is unpinned

One thread owns a cache: the thread that made it, or the last one that called `bind_thread`. Calls from any other thread
raise `WrongThread`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from kvweave.cache.allocator import PageAllocator
from kvweave.cache.arguments import blocks_to_drop, check_namespace, counts_of, ids_of, whole_number, whole_numbers
from kvweave.cache.call_guard import CallGuard
from kvweave.cache.contents import CacheContents, contents
from kvweave.cache.copies import NO_COPIES, Copies
from kvweave.cache.fork import Forks
from kvweave.cache.load import Loader
from kvweave.cache.publish import Publisher
from kvweave.cache.sequence import Batch, Pin, Rows, Sequence, SequenceOwner, Sequences
from kvweave.cache.snapshots import Snapshots
from kvweave.cache.state import CacheState
from kvweave.cache.stats import Stats, group_stats, pool_stats
from kvweave.cache.step_pages import StepOptions
from kvweave.cache.steps import Steps
from kvweave.cache.unread_copies import UnreadCopies
from kvweave.errors import (
    BadOption,
    BadSequence,
    BadTokens,
    BadType,
    CannotTruncate,
    NotSettled,
    UnknownName,
)
from kvweave.plan import Plan
from kvweave.policy import POLICIES, Policy
from kvweave.pool import Counts, Ids
from kvweave.prefix import ContentTokens, Event, Retention, Span, Tokens, as_tokens
from kvweave.prefix.tree import Match
from kvweave.table import BlockTable, spread

MOST_PRIORITY = 2**31 - 1
MOST_TOKENS = 2**40
"""No sequence is extended by more: sums of such numbers are still exact."""


class Cache(SequenceOwner):
    """A KV cache over a plan. It takes token ids and returns page ids; it allocates no tensors.

    `policy` decides which resume point is evicted first, `retention` where resume points are left. A sequence that has
    computed nothing yet may not take the last share `admission_reserve` of a pool's free and evictable pages while
    others run, which need it. Tables have `rows` rows of `max_tokens` tokens and keep their addresses (only the used
    part takes memory); if more than `rows` sequences are open, the tables are allocated again. A step may have
    `max_drafts` draft tokens. `on_event` is called for every change of what can be hit, in the midst of a call: neither
    it nor a policy may call the cache, and what it raises is a warning (`EventLost`).
    """

    def __init__(
        self,
        plan: Plan,
        *,
        policy: str | Policy = "adaptive",
        retention: Retention | None = None,
        admission_reserve: float = 0.0,
        rows: SupportsIndex = 256,
        max_tokens: SupportsIndex = 1_048_576,
        max_drafts: SupportsIndex = 15,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        if isinstance(policy, str) and policy not in POLICIES:
            raise UnknownName("policy", policy, POLICIES)
        if not (isinstance(policy, str) or callable(policy) or hasattr(policy, "value")):
            raise BadOption(f"a policy is a name, a function, or an object with a method `value`, not {policy!r}")
        num_rows, length = whole_number(rows, "rows"), whole_number(max_tokens, "max_tokens")
        num_drafts = whole_number(max_drafts, "max_drafts")
        for name, value, least in (("rows", num_rows, 1), ("max_tokens", length, 1), ("max_drafts", num_drafts, 0)):
            if value < least:
                raise BadOption(f"a cache needs {name} of at least {least}, got {value}")
        for what, given, kind in (("plan", plan, Plan), ("retention", retention or Retention(), Retention)):
            if not isinstance(given, kind):
                raise BadType(f"a cache needs a {what}, not {given!r:.80}")
        if on_event is not None and not callable(on_event):
            raise BadType(f"on_event must be a function, not {on_event!r:.80}")
        if not isinstance(admission_reserve, int | float) or not 0 <= admission_reserve < 1:
            raise BadOption(f"admission_reserve is a share of a pool from 0 to below 1, got {admission_reserve}")
        self._guard = CallGuard()
        emit = None if on_event is None else partial(self._guard.tell, on_event)
        self.state = CacheState(plan, num_rows, length, num_drafts, policy, retention or Retention(), emit)
        """Tables, pools, tree and counters, for tests and reports. Read only, as all that follows."""
        self.plan = plan
        self.grid = self.state.grid
        """Every group can resume at multiples of this many tokens only: the common multiple of the block sizes."""
        self.spacing = self.state.spacing
        """Where prompts leave resume points on their way, while memory is free."""
        self.sparse_spacing = self.state.sparse_spacing
        """Where they leave them once something had to be evicted."""
        super().__init__(self.state.counters, self.state.state_tags)
        self._allocator = PageAllocator(self.state, admission_reserve)
        self._snapshots = Snapshots(self.state)
        self._publisher = Publisher(self.state)
        self._steps = Steps(self.state, self._allocator, self._snapshots, self._publisher)
        self._forks = Forks(self.state, self._steps, partial(self.close, keep=False))
        self._loader = Loader(self.state, self._allocator, self._snapshots)
        self.state.prefix.order.call = self._guard.call_out
        self._contents = ContentTokens(emit)
        self._requests = self._prompt_tokens = self._hit_tokens = 0
        self._unread = UnreadCopies(self.state)
        self._tables = {table.group.tag: table for table in self.state.tables}

    # ---- open

    def open(
        self,
        tokens: object,
        *,
        namespace: Hashable = "",
        spans: SequenceOf[Span] = (),
        priority: SupportsIndex = 0,
        drop_last_blocks: SupportsIndex = 0,
        reuse: bool = True,
        points: Iterable[SupportsIndex] | None = None,
        branches: Iterable[SupportsIndex] = (),
    ) -> Sequence:
        """A sequence that starts with `tokens`; the longest joint hit is matched and pinned in one step.

        At least one token is left to compute. `namespace` is what must be equal for KV to be shared (model, adapter,
        tenant). `drop_last_blocks` makes the hit, and the resume points of the prompt, end this many grid blocks
        earlier: draft models that need hidden states ask for it. `points` are positions in the prompt or in the answer
        at which resume points are left (rounded down to the grid) instead of where the retention would leave them.
        `branches` are positions at which prompts that are known to come will differ from this one: the retention
        treats them like the positions at which this prompt differs from earlier ones.
        """
        prompt, dropped = self._prompt(tokens, namespace, spans), blocks_to_drop(drop_last_blocks)
        importance = whole_number(priority, "a priority")
        if not -MOST_PRIORITY <= importance <= MOST_PRIORITY:
            raise BadSequence(f"a priority is at most {MOST_PRIORITY}, and at least -{MOST_PRIORITY}; got {importance}")
        given = None if points is None else whole_numbers(points, "points")
        expected = [position // self.grid * self.grid for position in whole_numbers(branches, "branches")]
        state = self.state
        sequence = Sequence(self, -1, prompt, namespace, importance, state.prefix.tree.root(namespace))
        sequence.drop_last_blocks = dropped
        sequence.given_points, sequence.expected_branches = given, expected
        self._loader.open(sequence, prompt, self._match(namespace, prompt) if reuse else None)
        self._publisher.attach(sequence)
        self._requests += 1
        self._prompt_tokens += len(prompt)
        self._hit_tokens += sequence.num_cached
        return sequence

    def _prompt(self, tokens: object, namespace: Hashable, spans: SequenceOf[Span]) -> Tokens:
        """The tokens of a prompt as one array, contents replaced."""
        self._guard.check()
        if not isinstance(namespace, str):
            check_namespace(namespace)
        prompt = self._contents.replace(as_tokens(tokens), spans)
        if not len(prompt):
            raise BadTokens("a prompt needs at least one token")
        return prompt

    def _match(self, namespace: Hashable, prompt: Tokens) -> Match:
        return self.state.prefix.match(namespace, prompt, self._publisher.publish_running)

    def lookup(
        self,
        tokens: object,
        *,
        namespace: Hashable = "",
        spans: SequenceOf[Span] = (),
        drop_last_blocks: SupportsIndex = 0,
    ) -> int:
        """How many tokens of a prompt `open` would find. Pins nothing and does not count as a use."""
        prompt, dropped = self._prompt(tokens, namespace, spans), blocks_to_drop(drop_last_blocks)
        return self._loader.hit(self._match(namespace, prompt), len(prompt), dropped)

    def add_branch(self, sequence: Sequence, position: SupportsIndex) -> None:
        """Another prompt, now known to come, will differ from this one at `position`; as `branches` of `open`. Does
        nothing if pages for that position are allocated already: then it is too late to leave a resume point there."""
        self._row(sequence, check_copies=False)
        self.state.add_branch(sequence, whole_number(position, "a position"))

    def rematch(self, sequence: Sequence) -> int:
        """Look up the prompt of a waiting sequence again: other sequences may have committed more of it since `open`.

        The sequence must have computed nothing. Returns how many of its tokens are cached now. Costs as much as `open`.
        """
        self._row(sequence)
        if sequence.length != sequence.num_cached or sequence.length != sequence.committed:
            raise NotSettled(
                f"a sequence of {sequence.length} tokens, {sequence.num_cached} of them cached, has begun to compute:"
                " only one that has not can look again"
            )
        prompt = sequence.tokens
        match = self._match(sequence.namespace, prompt)
        if self._loader.hit(match, len(prompt), sequence.drop_last_blocks) > sequence.num_cached:
            before = sequence.num_cached
            self._publisher.detach(sequence)
            self._loader.reopen(sequence, prompt, match)
            self._publisher.attach(sequence)
            self._hit_tokens += sequence.num_cached - before
        return sequence.num_cached

    def check_fits(self, num_tokens: SupportsIndex, step_tokens: SupportsIndex = 1) -> None:
        """Raise `NeverFits` if a sequence of `num_tokens`, computed in steps of `step_tokens` from wherever a hit ends,
        would not fit an otherwise empty cache. Call it before the first chunk. Where several pages of a window share a
        super-page it may run short of some more, for windows scatter: the plan's `context` counts them."""
        length, step = whole_number(num_tokens, "a length"), whole_number(step_tokens, "a step")
        if length < 1 or step < 1:
            raise BadSequence(f"no sequence has {length} tokens, computed {step} a step")
        never = self._allocator.never_fits_in_steps(length, min(step, length))
        if never is not None:
            raise never

    # ---- steps

    def extend(
        self,
        sequences: Sequences,
        n: int | np.integer[Any] | SequenceOf[int] | Counts = 1,
        *,
        tokens: object = None,
        lookahead: SupportsIndex = 0,
        drafts: SupportsIndex = 0,
        checkpoints: bool = False,
    ) -> Copies:
        """Allocate pages for the next `n` tokens of each sequence (one number, or one for each); all or nothing.

        `tokens` are the ids of tokens beyond the prompt, all sequences one after the other; ids that are not known yet
        are given to `commit`. `lookahead` allocates pages for this many tokens more, so that steps within them are not
        refused; they are the sequence's until it is truncated or closed. The last `drafts` tokens may be rejected with
        `accept`: state groups then get a table column for each of them, and the engine writes the state after that
        token there. `checkpoints` also allocates pages for the state snapshots of this step
        (`Sequence.checkpoints`). Any number of steps may be prepared before the first is committed. Returns the copies
        that the engine must make before the step.
        """
        rows, chosen = self._rows(sequences)
        ahead, num_drafts = whole_number(lookahead, "lookahead"), whole_number(drafts, "drafts")
        counts = n if isinstance(n, int) else counts_of(n)
        least, most = _ends(counts, rows)
        counts = least if least == most else counts  # ids of equally many tokens are kept all at once
        can_be_counted = least >= 1 and most <= MOST_TOKENS and 0 <= ahead <= MOST_TOKENS
        if not can_be_counted or not 0 <= num_drafts <= min(least, self.state.max_drafts):
            raise BadSequence(
                f"cannot extend {len(rows)} sequences by {n} tokens (one number, or one each), with {ahead} ahead"
                f" and {num_drafts} drafts, of which there can be {self.state.max_drafts}"
            )
        start = self.state.counters.lengths[rows]
        options = StepOptions(ahead, num_drafts if self.state.states else 0, bool(checkpoints))
        if tokens is None:
            return self._unread.add(self._steps.extend(rows, chosen, start, counts, options))
        ids, are_new = self.state.tokens.checked(rows, chosen, start, counts, tokens)
        copies = self._steps.extend(rows, chosen, start, counts, options)
        self.state.tokens.add(rows, chosen, start, counts, ids, are_new)
        return self._unread.add(copies)

    def can_extend(self, sequences: Sequences, n: SupportsIndex) -> bool:
        """Whether `extend` by `n` tokens would succeed now; changes nothing. If it would not because window groups are
        short of pages, a smaller `n` may."""
        if (count := whole_number(n, "a number of tokens")) < 1:
            raise BadSequence(f"no sequence is extended by {count} tokens")
        return self._steps.can_extend(*self._rows(sequences, check_copies=False), min(count, MOST_TOKENS))

    def commit(
        self, sequences: Sequences, lengths: object = None, *, tokens: object = None, share: bool = True
    ) -> Copies:
        """The KV of tokens before `lengths` (default: all) is written and may be shared: prompts find it from now on.

        `tokens` are ids that `extend` was not given, equally many for each sequence. Draft tokens before `lengths` are
        accepted; those beyond are still undecided. With `share=False`, KV that these sequences write from now on is
        never found by other prompts. Returns the copies that the engine must make before the next step.
        """
        rows, chosen = self._rows(sequences)
        until = None if lengths is None else self._checked_lengths(rows, lengths)
        if tokens is not None:
            self._add_tokens(rows, chosen, tokens)
        if not share:
            for sequence in chosen:
                sequence.private_from = sequence.committed
        return self._unread.add(self._steps.commit(rows, chosen, until))

    def accept(self, sequences: Sequences, lengths: object) -> None:
        """Draft tokens before `lengths` (one number, or one for each) are accepted, those beyond are rejected; before
        or after `commit`. Their pages stay allocated: the next step needs them."""
        rows, chosen = self._rows(sequences)
        until = self._checked_lengths(rows, lengths)
        if self.state.states:
            rejected = self.state.counters.lengths[rows] - until
            if (rejected > self.state.counters.drafts[rows]).any():
                i = int(np.flatnonzero(rejected > self.state.counters.drafts[rows])[0])
                raise CannotTruncate(
                    f"{rejected[i]} tokens cannot be rejected: states are there for the"
                    f" {self.state.counters.drafts[rows[i]]} drafts of the last step"
                )
        self._steps.accept(rows, chosen, until)

    def _add_tokens(self, rows: Rows, chosen: list[Sequence], tokens: object) -> None:
        ids = ids_of(tokens)
        known, lengths = self.state.counters.known[rows], self.state.counters.lengths[rows]
        if len(ids) % len(rows) or (known + len(ids) // len(rows) > lengths).any():
            raise BadTokens(f"{len(ids)} ids for {len(rows)} sequences: no token after their lengths has a place")
        if len(ids):
            self.state.tokens.add(rows, chosen, known, len(ids) // len(rows), ids, True)

    def _checked_lengths(self, rows: Rows, lengths: object) -> Counts:
        until = counts_of(lengths)
        if isinstance(until, int):
            until = np.full(len(rows), until)
        elif until.shape != rows.shape:
            raise BadSequence(f"lengths of the shape {until.shape} for {len(rows)} sequences: one number, or one each")
        counters = self.state.counters
        bad = (until < counters.committed[rows]) | (until > counters.lengths[rows])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise BadSequence(
                f"{until[i]} tokens are not between the {counters.committed[rows[i]]} committed and the"
                f" {counters.lengths[rows[i]]} in all of a sequence"
            )
        return until

    def load_to(self, sequence: Sequence, position: SupportsIndex) -> None:
        """KV up to `position` is to be loaded: allocate the pages that resuming at `position` needs, and no others.

        Call it right after `open`, with a multiple of the grid that leaves a token to compute. All or nothing, as
        `extend`. Then fill the pages from `num_cached` on that are in the tables, whole pages, and the live states, and
        `commit`. If filling fails, `close` with `keep=False`: no other sequence has seen the pages.
        """
        self._row(sequence)
        start, end = sequence.length, whole_number(position, "a position")
        if start != sequence.num_cached or not start < end < sequence.num_prompt or end % self.grid:
            raise BadSequence(
                f"cannot load to {end}: right after open, a multiple of {self.grid} after {sequence.num_cached}"
                f" and before {sequence.num_prompt} can be loaded to; the sequence has {start} tokens"
            )
        self._loader.load_to(sequence, end)

    # ---- fork, truncate, close

    def fork(self, sequence: Sequence, n: SupportsIndex = 1) -> tuple[list[Sequence], Copies]:
        """`n` more sequences with the same tokens. Blocks up to the last multiple of the grid are shared; later blocks
        and states are copied."""
        self._row(sequence)
        if (count := whole_number(n, "a number of forks")) < 1:
            raise BadSequence(f"cannot fork into {count} sequences")
        copies = Copies()
        return self._forks.fork(sequence, count, copies), self._unread.add(copies)

    def reorder(self, sequences: SequenceOf[Sequence], parents: Iterable[SupportsIndex]) -> Copies:
        """Beam search: sequence i continues with the tokens of sequence `parents[i]`. All or nothing."""
        rows, chosen = self._rows(sequences)
        places = whole_numbers(parents, "parents")
        if len(places) != len(rows) or any(not 0 <= place < len(rows) for place in places):
            raise BadSequence(f"parents {places} do not name {len(rows)} sequences")
        copies = Copies()
        self._forks.reorder(chosen, places, copies)
        return self._unread.add(copies)

    def truncate(self, sequence: Sequence, length: SupportsIndex) -> Copies:
        """Forget the tokens from `length` on, those of the prompt too; their pages are freed. Nothing has to be copied:
        no other sequence holds a block that is still to be written."""
        self._row(sequence)
        low, end = max(1, sequence.node.end), whole_number(length, "a length")
        if not low <= end <= sequence.length:
            raise CannotTruncate(f"cannot cut {sequence.length} tokens to {end}; {low} are shared with the tree")
        self._forks.truncate(sequence, end)
        return NO_COPIES

    def close(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence, or preempt it: committed KV stays cached, unless `keep` is False; other pages are freed. A
        preempted sequence resumes from its cached prefix when it is opened again with its tokens."""
        self._row(sequence, check_copies=False)
        state = self.state
        if self._unread.include(sequence.rows):
            self._unread.drop(sequence)
        elif keep:
            self._snapshots.donate_live(sequence)
            self._publisher.publish_end(sequence)
        self._publisher.detach(sequence)
        self._loader.leave_row(sequence)
        self._snapshots.drop_after(sequence, -1)
        state.prefix.unpin(sequence.node)
        state.free_row(sequence)

    # ---- what stays

    def pin(self, tokens: object, *, namespace: Hashable = "", spans: SequenceOf[Span] = ()) -> Pin | None:
        """Keep the longest cached prefix of `tokens` (a system prompt) from eviction; None when nothing is cached."""
        prompt = self._prompt(tokens, namespace, spans)
        match = self._match(namespace, prompt)
        position = self.state.prefix.tree.hit(match, match.length)
        return Pin(self, self._loader.pin(match, position)) if position else None

    def unpin(self, pin: Pin) -> None:
        """Make a pinned prefix evictable again."""
        self._guard.check()
        if not isinstance(pin, Pin) or pin.owner is not self:
            raise BadSequence("this prefix is not pinned, or not in this cache")
        pin.owner = None
        self._loader.unpin(pin.point)

    def publish(self) -> None:
        """Put all committed KV into the prefix tree now. `open` does this by itself for the prompt that it looks up."""
        self._guard.check()
        self._publisher.publish_all()

    def reset(self) -> None:
        """Drop everything cached. No sequence may be open, and no prefix pinned."""
        self._guard.check()
        pinned = sum(root.pins for root in self.state.prefix.tree.roots.values()) - len(self.state.by_row)
        if self.state.by_row or pinned:
            raise BadSequence(
                f"{len(self.state.by_row)} sequences are open and {pinned} prefixes pinned: close them before a reset"
            )
        self.state.prefix.clear()
        self._contents.forget()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close all sequences that are open; what they committed stays."""
        for sequence in reversed(list(self.state.by_row.values())):  # who found something before who left it
            self.close(sequence)

    # ---- tables

    def table(self, tag: str) -> Ids:
        """Page ids `[rows, slots]`: index it with the rows of sequences. A view, valid until the cache grows."""
        return self._table(tag).pages

    def kernel_table(self, tag: str) -> Ids:
        """Kernel-block ids, in step with `table`."""
        return self._table(tag).kernels

    def take_changed_rows(self, tag: str) -> Counts:
        """The rows of a table that changed since the last call: those that a copy on a device must update."""
        return self._table(tag).take_changed()

    def slots(self, sequence: Sequence, tag: str, start: SupportsIndex, end: SupportsIndex | None = None) -> Counts:
        """Where the rows of tokens [start, end) are written; -1 for those of other context-parallel ranks."""
        self._row(sequence)
        first, last = whole_number(start, "start"), sequence.length if end is None else whole_number(end, "end")
        if not 0 <= first <= last <= sequence.length:
            raise BadSequence(f"slots {first} to {last} of a sequence of {sequence.length} tokens")
        if self._table(tag).group.is_state:
            raise BadOption(f"group {tag!r} keeps states, no rows of tokens: the page of the live one is in its table")
        positions = np.arange(first, last)
        return self._table(tag).slots(np.full(len(positions), sequence.row), positions, self.plan.parallel.cp_rank)

    def slot_mapping(self, sequences: Sequences) -> dict[str, Counts]:
        """Where the rows of the last step's tokens are written, of all sequences one after the other, by tag."""
        rows, _ = self._rows(sequences)
        start = self.state.counters.step_start[rows]
        rows, positions = spread(rows, start, self.state.counters.lengths[rows] - start)
        rank = self.plan.parallel.cp_rank
        return {group.tag: self.state.tables[group.number].slots(rows, positions, rank) for group in self.state.rows}

    def _table(self, tag: str) -> BlockTable:
        if tag not in self._tables:
            self.plan.group(tag)  # it says which tags there are
        return self._tables[tag]

    # ---- stats

    def stats(self) -> Stats:
        """The counts of this moment."""
        state = self.state
        return Stats(
            group_stats(state),
            pool_stats(state),
            len(state.by_row),
            state.prefix.tree.num_nodes,
            self._requests,
            self._prompt_tokens,
            self._hit_tokens,
            sum(pages.num_evicted for pages in state.pages),
        )

    def contents(self) -> CacheContents:
        """What is where, page by page and run by run; everything committed is published first."""
        self.publish()
        return contents(self.state, self.stats())

    def flush_tokens(self, sequence: Sequence) -> None:
        """Append the ids given to the last steps to the sequence's tokens."""
        self.state.tokens.flush(sequence)

    # ---- rows, threads

    def bind_thread(self) -> None:
        """The calling thread owns the cache from now on. The thread that owned it must not be inside a call."""
        self._guard.bind()

    def _rows(self, sequences: Sequences, check_copies: bool = True) -> tuple[Rows, list[Sequence]]:
        """Checks that these are open sequences of this cache, whose copies were read; returns their rows."""
        self._guard.check()
        if isinstance(sequences, Sequence):
            if sequences.owner is not self or sequences.row < 0:
                raise BadSequence(f"the sequence is {'closed' if sequences.owner is self else 'of another cache'}")
            rows, chosen = sequences.rows, [sequences]
        else:
            batch = sequences if isinstance(sequences, Batch) else Batch(sequences)
            if batch.checked != self.state.num_closed or batch.owner is not self:
                batch.check(self)
                batch.checked = self.state.num_closed
            rows, chosen = batch.rows, batch.sequences
        if check_copies and self._unread.include(rows):
            raise NotSettled("the copies that the last call returned were never read: carry them out first")
        return rows, chosen

    def _row(self, sequence: Sequence, check_copies: bool = True) -> None:
        """`_rows` for calls that take no batch."""
        if not isinstance(sequence, Sequence):
            raise BadSequence(f"this call is for one sequence, not {sequence!r:.80}")
        self._rows(sequence, check_copies)


def _ends(counts: Counts | int, rows: Rows) -> tuple[int, int]:
    """The least and the most, sooner than by `min` and `max`; 0 where there is not one for each row."""
    if isinstance(counts, int):
        return counts, counts
    if counts.shape != rows.shape:
        return 0, 0
    return int(counts[counts.argmin()]), int(counts[counts.argmax()])
