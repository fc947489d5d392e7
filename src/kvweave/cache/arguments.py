"""Numbers, ids of tokens and namespaces as callers pass them, checked."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadSequence, BadType
from kvweave.pool import Counts, Ids
from kvweave.prefix import as_tokens


def whole_number(value: SupportsIndex, what: str) -> int:
    """A whole number of any type as Python's own, whose sums and products never overflow."""
    try:
        return index(value)
    except TypeError:
        raise BadType(f"{what} must be a whole number, not {value!r:.80}") from None


def whole_numbers(values: Iterable[SupportsIndex], what: str) -> list[int]:
    """The same of each of them."""
    try:
        given = list(values)
    except TypeError:
        raise BadType(f"{what} must be a list of whole numbers, not {values!r:.80}") from None
    return [whole_number(value, f"each of {what}") for value in given]


def blocks_to_drop(value: SupportsIndex) -> int:
    if (blocks := whole_number(value, "drop_last_blocks")) < 0:
        raise BadSequence(f"drop_last_blocks must be at least 0, got {blocks}")
    return blocks


def counts_of(numbers: object) -> Counts | int:
    """One whole number of tokens, or an array of them."""
    array = _array(numbers)
    if array.dtype.kind not in "iu":
        raise BadSequence(f"whole numbers of tokens are needed, one or one for each sequence, got {numbers!r:.80}")
    return array.astype(np.int64, copy=False) if array.ndim else int(array)


def ids_of(tokens: object) -> Ids:
    """Ids of tokens, those of several sequences one after the other."""
    return as_tokens(tokens if isinstance(tokens, np.ndarray) and tokens.ndim == 1 else _array(tokens).ravel())


def _array(values: object) -> NDArray[Any]:
    """Lists of different lengths are none."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.array(values, object)


def check_namespace(namespace: object) -> None:
    try:
        hash(namespace)
    except TypeError:
        raise BadType(f"a namespace must be hashable, not {namespace!r:.80}") from None
