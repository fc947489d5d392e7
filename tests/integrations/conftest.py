"""Tiny matrices: more threads only wait for one another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
