"""What goes to a tier in one turn: enough to be worth the way, and little enough for memory, and for several turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

BATCH_BYTES = 16 << 20


def batches(
    items: Iterable[Item], num_bytes: Callable[[Item], int], most_bytes: int | None = None
) -> Iterator[list[Item]]:
    """Items in order, as many at a time as have `most_bytes` (`BATCH_BYTES`) together; a larger one comes alone."""
    most = BATCH_BYTES if most_bytes is None else most_bytes
    batch: list[Item] = []
    filled = 0
    for item in items:
        size = num_bytes(item)
        if batch and filled + size > most:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch
