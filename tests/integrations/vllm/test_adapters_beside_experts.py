"""What of the matrix vLLM itself lacks on a CPU: in a file of its own, since the engine that fails cannot go on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.vllm.models import NEED_EXPERTS

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from tests.integrations.vllm.engines import engine, tokens

pytestmark = pytest.mark.slow


def refusal(path: Path) -> str:
    """What vLLM says to a prompt, with adapters and without a connector. Nothing holds the engine afterwards."""
    try:
        with engine(path, enable_lora=True, max_lora_rank=8) as made:
            made.one(tokens(50))
    except AttributeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NEED_EXPERTS)
def test_vllm_cannot_serve_adapters_beside_experts_on_a_cpu(name: str, model: Callable[..., Path]) -> None:
    """When this fails, the cell of the matrix can be tried: take the name out of `NEED_EXPERTS`."""
    words = refusal(model(name))
    gc.collect()
    assert words.startswith("module 'triton.language' has no attribute")
