"""What talks to CUDA's driver is C, and says so where it is missing."""

from __future__ import annotations

import sys

import pytest

from kvweave.errors import NotBuilt


def test_without_its_part_in_c_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvweave.transfer._native", None)
    monkeypatch.delitem(sys.modules, "kvweave.transfer.driver", raising=False)
    with pytest.raises(NotBuilt, match="with a C compiler and without KVWEAVE_PURE"):
        import kvweave.transfer.driver  # noqa: F401
