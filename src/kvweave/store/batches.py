"""Batches for a tier: large enough that a request is worth its latency, small enough for memory and for several in
flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

BATCH_BYTES = 16 << 20


def batches(items: Iterable[Item], size_of: Callable[[Item], int], most: int | None = None) -> Iterator[list[Item]]:
    """Items in order, in batches whose sizes sum to at most `most` (`BATCH_BYTES`); a larger item is a batch alone."""
    most = BATCH_BYTES if most is None else most
    batch: list[Item] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if batch and filled + size > most:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch
