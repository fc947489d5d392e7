"""Copies that calls have returned and the engine has not read: until then their sequences cannot go on."""

from __future__ import annotations

from kvweave.cache.copies import NO_COPIES, Copies
from kvweave.cache.sequence import Rows, Sequence
from kvweave.cache.state import CacheState
from kvweave.errors import NotSettled


class UnreadCopies:
    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._returned: list[Copies] = []

    def add(self, copies: Copies | None) -> Copies:
        """What a call returns."""
        if not copies:
            return NO_COPIES
        self._returned.append(copies)
        return copies

    def include(self, rows: Rows) -> bool:
        """Whether there are any for one of these rows."""
        if not self._returned:
            return False
        self._returned = [copies for copies in self._returned if copies and not copies.taken]
        return any(copies.includes(rows.tolist()) for copies in self._returned)

    def drop(self, sequence: Sequence) -> None:
        """A sequence is closed whose copies were never read: states that they should have filled are dropped. Raises
        `NotSettled`, and changes nothing, if others need such a state."""
        prefix, tags = self._state.prefix, self._state.state_tags
        never = set[tuple[str, int]]().union(*(copies.targets(sequence.row) for copies in self._returned))
        points = [point for node in sequence.node.path() for point in node.points]
        points = [point for point in points if not never.isdisjoint(zip(tags, point.states))]
        if any(point.pins for point in points):
            raise NotSettled(
                "another sequence or a pin goes on from a state that copies were to fill which were never read: carry"
                " them out, or close those first"
            )
        for copies in self._returned:
            copies.drop(sequence.row)
        for point in points:
            prefix.drop_point(point)
