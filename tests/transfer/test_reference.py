"""The reference copier keeps the contract that it is the measure of."""

from __future__ import annotations

import pytest

from kvweave.transfer import Copier, ReferenceCopier
from tests.transfer.contract import CopierContract


class TestReference(CopierContract):
    @pytest.fixture
    def copier(self) -> Copier:
        return ReferenceCopier()
