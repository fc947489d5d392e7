"""The pieces of a prompt, (shard, chunk), that a store asks for or keeps: what the joint formula says of a schema."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.prefix import joint_hit
from kvweave.store.keys import HashedPrompt
from kvweave.store.operations import ChunkRef
from kvweave.store.page_payloads import Gather, PagedSource, Source
from kvweave.store.shards import Schema


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


class PromptPieces:
    """The pieces of a schema's prompts. No tier is asked."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    # ---- mistakes have names

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

    # ---- what the formula says

    def _position(self, prompt: HashedPrompt, present: NDArray[np.bool_], limit: int, multiple_of: int = 1) -> int:
        size = self.schema.chunk_tokens
        groups = [group.presence(present) for group in self.schema.groups]
        return joint_hit(groups, math.lcm(size, multiple_of), min(limit, prompt.num_chunks * size))

    def _needs(
        self, position: int, shards: Sequence[int] | range, present: NDArray[np.bool_], start: int = 0
    ) -> Iterator[ChunkRef]:
        """What going on from `position` needs of `shards`; tails where they are `present`, and whole chunks are not.
        Chunks that end before `start` are left out."""
        pieces = self._pieces(position, shards, present, start)
        return zip(pieces[:, 0].tolist(), pieces[:, 1].tolist(), strict=True)

    def _pieces(
        self, position: int, shards: Sequence[int] | range, present: NDArray[np.bool_], start: int = 0
    ) -> NDArray[np.int64]:
        """As `_needs`, `[n, 2]`."""
        pieces = np.concatenate([group.needs(position, present) for group in self.schema.groups])
        if start:
            pieces = pieces[pieces[:, 1] >= start // self.schema.chunk_tokens]
        if len({*shards}) < len(self.schema.shards):
            pieces = pieces[np.isin(pieces[:, 0], [*shards])]
        return pieces

    def _to_keep(
        self,
        prompt: HashedPrompt,
        source: Source,
        points: Sequence[int] | None,
        shards: Sequence[int] | None,
        start: int,
    ) -> list[ChunkRef]:
        """What resuming at `points` needs, chunk by chunk: earlier chunks are worth more. A tail where the source does
        not have the complete chunk."""
        self._check(prompt)
        self._check_start(prompt, start)
        size = self.schema.chunk_tokens
        ends = [prompt.num_chunks * size] if points is None else whole_numbers("points", points)
        outside = [point for point in ends if not 0 <= point <= prompt.num_tokens]
        if outside:
            raise StoreError(f"points {outside[:4]}: the prompt has {prompt.num_tokens} tokens")
        between = [point for point in ends if point % size]
        if between:
            raise StoreError(f"points {between[:4]}: chunks are of {size} tokens, and a point is a multiple of that")
        num_shards, wanted = len(self.schema.shards), self._shard_numbers(shards)

        # asked once, and not at all of our own: of a protocol it takes long
        paged = source if isinstance(source, Gather | PagedSource) else None

        def takes_tail(shard: int, chunk: int) -> bool:
            return paged is not None and not paged.holds(self.schema.shards[shard], chunk)

        found = [np.empty((0, 2), np.int64)]
        for group in self.schema.groups:
            # what is needed from the first token on is all needed by the last point: a prompt may have thousands
            needing = ends if group.reach.tail(max(ends, default=0)) else [max(ends, default=0)]
            for end in needing:
                found.append(group.pieces(end, takes_tail, first=start // size))
        pieces = np.concatenate(found)
        if len({*wanted}) < num_shards:
            pieces = pieces[np.isin(pieces[:, 0], [*wanted])]
        numbers = pieces[:, 1] * num_shards + pieces[:, 0]
        numbers = np.unique(numbers) if len(ends) > 1 else np.sort(numbers)  # points may need the same
        return [*zip((numbers % num_shards).tolist(), (numbers // num_shards).tolist(), strict=True)]
