"""Tickets of another schema are refused, though all their lengths fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvweave.errors import StoreError
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Role
from kvweave.store import Namespace, Schema
from kvweave.store.keys import prompt
from kvweave.store.ticket import read_ticket, write_ticket


def schema(dtype: DType) -> Schema:
    cache = LayerCache("full", Full(), (Role("key", (4,), dtype),))
    return Schema.of(ModelSpec("m", (Layer((cache,)),)), chunk_tokens=8, parts=1)


def test_a_ticket_is_of_one_schema() -> None:
    mine, other = schema(DType.FLOAT32), schema(DType.FLOAT16)
    hashed = prompt([*range(20)], Namespace("m"), 8)
    ticket = write_ticket(mine, hashed, 16, np.ones((1, 2), bool), 60.0)
    assert read_ticket(mine, ticket).position == 16
    with pytest.raises(StoreError, match="another schema"):
        read_ticket(other, ticket)


@pytest.mark.parametrize(("position", "num_tokens"), [(12, 20), (16, 16), (16, 9)])
def test_a_ticket_for_a_position_that_no_lookup_finds_is_refused(position: int, num_tokens: int) -> None:
    hashed = replace(prompt([*range(20)], Namespace("m"), 8), num_tokens=num_tokens)
    ticket = write_ticket(schema(DType.FLOAT32), hashed, position, np.ones((1, 2), bool), 60.0)
    with pytest.raises(StoreError, match="another schema"):
        read_ticket(schema(DType.FLOAT32), ticket)
