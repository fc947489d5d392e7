"""A proof, at an engine's start, that its memory is as described: a wrong order of bytes has no other sign."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.plan import Parallel
from kvweave.spec import Role
from kvweave.store.keys import Bytes
from kvweave.store.page_payloads import PagePayloads
from kvweave.store.payload_copies import Tables, in_items
from kvweave.store.shards import Schema, Shard, axis_slices

Written = Mapping[tuple[int, str, str], NDArray[Any]]
"""By layer, tag and role: `[tokens, *row]` of the first chunk, this rank's share of heads; of states `[1, *row]`."""


def prove_layout(schema: Schema, pages: PagePayloads, tables: Tables, written: Written) -> int:
    """Raises `StoreError` where rows that the engine's own kernels wrote into pages are not found as they were given.

    Rows should be random, so that none is like another. Roles that `written` lacks are not proved; how many were is
    returned. A rank that writes none of a role's parts (more ranks than heads) proves nothing of it.
    """
    source, proved = pages.source(tables), set[tuple[int, str, str]]()
    for shard in (schema.shards[number] for number in pages.writes):
        fields = [*shard.fields()] if not shard.first_token else []
        known = [(layer, role, where) for layer, role, where in fields if (layer, shard.tag, role.name) in written]
        payload = source(shard, 0) if known else np.empty(0, np.uint8)
        for layer, role, where in known:
            proved.add(name := (layer, shard.tag, role.name))
            _compare(name, payload[where], _share(written[name], shard, role, pages.parallel))
    return len(proved)


def _share(rows: NDArray[Any], shard: Shard, role: Role, parallel: Parallel) -> Bytes:
    """What a rank's rows are in a shard's payload, `[rows, bytes]`."""
    slices = zip(axis_slices(role, parallel.tp, parallel.tp_rank), shard.axis_slices(role), strict=True)
    both = [in_items(mine, role).within(in_items(theirs, role)) for mine, theirs in slices]
    cut = np.concatenate([rows[:, mine] for mine, _ in filter(None, both)], axis=1)
    return np.ascontiguousarray(cut).reshape(len(rows), -1).view(np.uint8)


def _compare(name: tuple[int, str, str], found: Bytes, expected: Bytes) -> None:
    if found.nbytes != expected.nbytes:
        raise StoreError(
            f"layer {name[0]}, {name[2]!r}: {expected.nbytes} bytes were written, a chunk has {found.nbytes}"
        )
    wrong = np.flatnonzero((found.reshape(expected.shape) != expected).any(axis=1))
    if len(wrong):
        raise StoreError(
            f"layer {name[0]} of group {name[1]!r}, {name[2]!r}: {len(wrong)} of {len(expected)} rows, from token"
            f" {wrong[0]} on, are not where the view says; does the kernel keep them in another order?"
        )
