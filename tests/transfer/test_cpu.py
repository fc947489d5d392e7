"""The CPU copier keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvweave.transfer import Copier, CPUCopier
from tests.transfer.contract import CopierContract


class TestCPU(CopierContract):
    @pytest.fixture
    def copier(self) -> Iterator[Copier]:
        made = CPUCopier(threads=2)
        yield made
        made.close()
