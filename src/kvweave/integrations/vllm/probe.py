"""The proof at start: random rows are written through the engine's own kernels and views, and read as the store would.

A wrong order of bytes has no other sign than wrong tokens later, and only where blocks or degrees differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.integrations.vllm.binding import Bound
from kvweave.integrations.vllm.engine_groups import EngineGroup, EngineLayer
from kvweave.integrations.vllm.step_messages import Pages
from kvweave.store import PagePayloads, Schema, prove_layout

WriteRows = Callable[[EngineGroup, EngineLayer, Pages, int], Mapping[str, NDArray[Any]]]
"""Writes random rows of the first tokens into these pages, as the engine does; returns them by role, `[tokens, *row]`.
Of states: one row."""


def prove(
    schema: Schema,
    pages: PagePayloads,
    bound: Bound,
    groups: Sequence[EngineGroup],
    layers: Sequence[EngineLayer],
    write: WriteRows,
) -> int:
    """How many roles of layers were proved. Raises `StoreError` for rows that are not where a view says.

    Called before any request: no page is in use. Those that were written are zeroed again.
    """
    by_name, opaque = {layer.name: layer for layer in layers}, {layer.name for layer in bound.opaque}
    tags = {(view.layer, view.role): view.tag for view in bound.memory.views}
    tables, first = dict[str, Pages](), 1
    written: dict[tuple[int, str, str], NDArray[Any]] = {}
    for group in groups:  # one page belongs to one group at a time, since groups share memory
        count = 1 if group.is_state else -(-schema.chunk_tokens // group.block_tokens)
        tables[group.table] = used = np.arange(first, first + count, dtype=np.int32)
        first += count
        for layer in (by_name[name] for name in group.layers if name not in opaque):
            for role, rows in write(group, layer, used, schema.chunk_tokens).items():
                written[layer.index, tags[layer.index, role], role] = rows
    proved = prove_layout(schema, pages, tables, written)
    for group in groups:
        for layer in (by_name[name] for name in group.layers):
            for page in tables[group.table].tolist():
                layer.raw[page * layer.blocks_per_page : (page + 1) * layer.blocks_per_page].zero_()
    return proved
