"""The joint hit in pages, against the definition of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvweave.integrations.sglang.restorable_lengths import leading, longest, restorable

FLAGS = st.lists(st.booleans(), max_size=9).map(lambda flags: np.array(flags, bool))


@given(FLAGS, st.none() | st.integers(1, 4))
def test_a_length_is_restorable_if_its_last_pages_are_there(present: np.ndarray, trailing: int | None) -> None:
    found = restorable(present, trailing)
    for length in range(1, len(present) + 1):
        first = 0 if trailing is None else max(0, length - trailing)
        assert found[length - 1] == all(present[first:length])


@given(FLAGS)
def test_all_pages_are_restorable_up_to_the_first_that_is_missing(present: np.ndarray) -> None:
    assert longest(restorable(present, None)) == leading(present)
    assert leading(present) == next((at for at, flag in enumerate(present) if not flag), len(present))
