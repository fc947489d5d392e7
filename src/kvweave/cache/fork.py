"""Fork, reorder, truncate: sequences that share their first tokens, and sequences that drop their last ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvweave.cache.copies import Copies
from kvweave.cache.sequence import FIELDS, Batch, Sequence
from kvweave.cache.state import CacheState
from kvweave.cache.steps import Steps
from kvweave.errors import CannotTruncate, NotSettled
from kvweave.pool import Counts, Ids, PagedGroup


class Forks:
    """Blocks that are in the tree are shared. Those behind its last run, and the live states, are copied: so no block
    that is still to be written has two holders, and no page is in the tree twice."""

    def __init__(self, state: CacheState, steps: Steps, drop: Callable[[Sequence], None]) -> None:
        self.state = state
        self.steps = steps
        self.publisher = steps.publisher
        self._drop = drop

    # ---- fork

    def fork(self, sequence: Sequence, n: int, copies: Copies) -> list[Sequence]:
        self._check_settled(sequence)
        self._ensure([sequence], {0: n})
        return self._fork_now(sequence, n, copies)

    def _fork_now(self, sequence: Sequence, n: int, copies: Copies) -> list[Sequence]:
        """For which there is room. The parent is published, so that full blocks are the tree's."""
        self.publisher.publish(sequence, without_point=True)
        self.state.set_next_event(sequence)
        return [self._child(sequence, copies) for _ in range(n)]

    def _check_settled(self, sequence: Sequence) -> None:
        counters, row = self.state.counters, sequence.row
        length, committed, drafts = (int(c[row]) for c in (counters.lengths, counters.committed, counters.drafts))
        if drafts or committed != length:
            raise NotSettled(
                f"a sequence of {length} tokens with {committed} committed and {drafts} drafts cannot"
                " be forked: accept and commit its steps first"
            )
        if sequence.num_tokens < committed:
            raise NotSettled(
                f"{committed} tokens are committed, but the ids of only {sequence.num_tokens} are known: pass the"
                " others to commit"
            )

    def _ensure(self, sequences: list[Sequence], children: dict[int, int]) -> None:
        """Make sure that sequence i can have so many children more."""
        demand = [0] * len(self.state.groups)
        for i, count in children.items():
            for group in self.state.groups:
                demand[group.number] += count * len(self._blocks(group, sequences[i])[1])
        pool = self.steps.allocator.ensure(demand)
        if pool is not None:
            lengths = np.array([sequence.committed for sequence in sequences])
            raise self.steps.allocator.refusal(pool, demand, sequences, lengths, lengths, Batch(sequences).rows)

    def _blocks(self, group: PagedGroup, sequence: Sequence) -> tuple[int, Counts, int]:
        """How many blocks a child shares, in the tree by then; of which others it needs copies; how many it has."""
        table, row = self.state.tables[group.number], sequence.row
        shared, end = 0, min(1, table.blocks_of[row])
        if not group.is_state:
            length, grid = self.state.counters.committed_of[row], self.state.grid
            shared = min(length, sequence.private_from) // grid * grid // group.slot_tokens
            end = -(-length // group.slot_tokens)
        return shared, shared + np.flatnonzero(table.pages[row, shared:end]), end

    def _child(self, sequence: Sequence, copies: Copies) -> Sequence:
        state, row = self.state, self.state.take_row()
        child = sequence.fork(row)
        state.prefix.pin(child.node)
        if child.restore is not None:
            state.prefix.pin_states(child.restore, 1)
        state.by_row[row] = child
        state.counters.copy(sequence.row, row)
        for group in state.groups:
            self._share(group, sequence, row, copies)
        self.publisher.attach(child)
        state.set_next_lengths(child)
        return child

    def _share(self, group: PagedGroup, sequence: Sequence, row: int, copies: Copies) -> None:
        """Enter the pages of a sequence into `row`, and copies of those that cannot be shared."""
        state, table, source = self.state, self.state.tables[group.number], sequence.row
        shared, copied, end = self._blocks(group, sequence)
        pages: Ids = np.zeros(end, np.int32)
        pages[:shared] = table.pages[source, :shared]
        pages[copied] = state.pages[group.number].allocate(len(copied))
        if group.is_window:
            state.pages[group.number].share(pages[:shared])
        for block in copied.tolist():
            copies.add(row, group.tag, int(table.pages[source, block]), int(pages[block]))
        table.write(row, 0, pages)
        table.first_of[row], table.blocks_of[row] = table.first_of[source], end

    # ---- reorder

    def reorder(self, sequences: list[Sequence], parents: list[int], copies: Copies) -> None:
        """Close those that are nobody's parent, whose rows and places the further children of the others take."""
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(parents):
            children.setdefault(parent, []).append(child)
        for parent, own in children.items():
            if len(own) > 1:
                self._check_settled(sequences[parent])
        self._ensure(sequences, {parent: len(own) - 1 for parent, own in children.items()})
        for i, sequence in enumerate(sequences):
            if i not in children:
                self._drop(sequence)
        places: dict[int, Sequence] = {}
        for parent, own in children.items():
            keeper = parent if parent in own else own[0]
            others = [child for child in own if child != keeper]
            made = self._fork_now(sequences[parent], len(others), copies) if others else []
            places |= {keeper: sequences[parent], **dict(zip(others, made, strict=True))}
        self._swap(sequences, places)

    def _swap(self, sequences: list[Sequence], places: dict[int, Sequence]) -> None:
        """Sequence i becomes `places[i]`."""
        for sequence in places.values():
            self.publisher.detach(sequence)
        lives = {i: {name: getattr(s, name) for name in FIELDS} for i, s in places.items()}
        for sequence in places.values():
            sequence.row = -1
        for i, sequence in enumerate(sequences):
            for name, value in lives[i].items():
                setattr(sequence, name, value)
            self.state.by_row[sequence.row] = sequence
            self.state.counters.generation_of[sequence.row] += 1  # batches made before mean other sequences
            self.publisher.attach(sequence)
            self.state.set_next_event(sequence)
        self.state.num_closed += 1

    # ---- truncate

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Reject the tokens from `length` on, committed ones too, and give back their pages, after making sure that
        what is before them is all there."""
        state, row, counters = self.state, sequence.row, self.state.counters
        for group in state.groups:
            self._check_reach(group, sequence, length)
        for group in state.rows:
            table = state.tables[group.number]
            keep, blocks = -(-length // group.slot_tokens), table.blocks_of[row]
            pages: Ids = table.pages[row, keep:blocks].copy()
            table.erase(row, keep, blocks)
            table.blocks_of[row] = min(keep, blocks)
            state.pages[group.number].release(pages)
        sequence.num_prompt = counters.prompt_of[row] = min(sequence.num_prompt, length)
        counters.committed_of[row] = min(counters.committed_of[row], length)
        self.steps.accept(sequence.rows, [sequence], np.array([length]))
        self.steps.snapshots.drop_after(sequence, length)
        self.publisher.detach(sequence)
        self.publisher.attach(sequence)
        state.set_next_lengths(sequence)

    def _check_reach(self, group: PagedGroup, sequence: Sequence, length: int) -> None:
        row, table = sequence.row, self.state.tables[group.number]
        if group.is_state:
            rejected = sequence.length - length
            if rejected >= max(1, table.blocks_of[row]) and sequence.restore is None:
                raise CannotTruncate(
                    f"group {group.tag!r} holds the state after {sequence.length} tokens, not after {length}; extend"
                    " with drafts= to be able to go back, or open the sequence again from its tokens"
                )
        elif group.is_window and group.first_block(length) < table.first_of[row]:
            raise CannotTruncate(
                f"group {group.tag!r} needs tokens from {group.first_block(length) * group.slot_tokens} on to go on"
                f" from {length}, but holds only those from {table.first_of[row] * group.slot_tokens} on; open the"
                " sequence again from its tokens"
            )
