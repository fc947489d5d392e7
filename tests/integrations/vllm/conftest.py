"""Checkpoints and stores of the tests in a real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a tiny checkpoint, by name."""
    from tests.integrations.vllm.models import checkpoint

    folder = tmp_path_factory.getbasetemp() / "checkpoints"
    folder.mkdir(exist_ok=True)
    return lambda name, seed=0, **kind: checkpoint(name, folder, seed, **kind)
