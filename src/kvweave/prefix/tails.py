"""Tails in blocks, remembered: the same few positions are asked for again and again."""

from __future__ import annotations

from kvweave.spec import Reach

MOST = 4096


class Tails:
    """The first block of `block_tokens` tokens, behind the head, that is needed to go on from a position."""

    def __init__(self, reach: Reach, block_tokens: int) -> None:
        self.reach = reach
        self.block_tokens = block_tokens
        self._known: dict[int, int] = {}

    def first_block(self, position: int) -> int:
        block = self._known.get(position, -1)
        if block < 0:
            if len(self._known) >= MOST:
                self._known.clear()
            block = int(self.reach.tail(position)) // self.block_tokens
            self._known[position] = block
        return block
