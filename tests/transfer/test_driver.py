"""What talks to CUDA's driver is C, and says so where it is missing."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvweave.errors import NotBuilt
from kvweave.transfer.driver import addresses


def test_without_its_part_in_c_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvweave.transfer._native", None)
    monkeypatch.delitem(sys.modules, "kvweave.transfer.driver", raising=False)
    with pytest.raises(NotBuilt, match="with a C compiler and without KVWEAVE_PURE"):
        import kvweave.transfer.driver  # noqa: F401


def test_addresses_are_those_of_the_arrays_memory_also_where_it_is_read_only() -> None:
    memory = np.zeros(100, np.uint8)
    arrays = [memory, memory[7:9], memory[50:]]
    arrays[1].flags.writeable = False
    assert addresses(arrays).tolist() == [each.ctypes.data for each in arrays]
    assert addresses([]).tolist() == []
    with pytest.raises(ValueError, match="contiguous"):
        addresses([memory[::2]])
    with pytest.raises(TypeError):
        addresses([memory, 5])  # type: ignore[list-item]
