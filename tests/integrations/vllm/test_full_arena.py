"""A daemon with less memory than the prompts need: in a file of its own, since a process has one engine at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from tests.integrations.vllm.engines import engine, tokens
from tests.server.models import spawned

pytestmark = pytest.mark.slow


def test_an_arena_that_is_full_costs_hits_and_no_answer(model: Callable[..., Path], tmp_path: Path) -> None:
    prompts = [tokens(700, seed=30 + number) for number in range(6)]
    with (
        spawned(tmp_path / "kv.sock", "--memory", "1MiB"),
        engine(model("gemma3"), {"socket": str(tmp_path / "kv.sock")}) as made,
    ):
        first = [made.one(prompt) for prompt in prompts]
        made.forget()
        again = [made.one(prompt) for prompt in prompts]
        assert made.counts["tokens_saved"] >= 6 * 640
        assert made.counts["tokens_loaded"] < 6 * 640
    assert max(one.difference(other) for one, other in zip(first, again, strict=True)) < 1e-3
