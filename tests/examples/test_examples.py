"""The scripts of examples/ run as they are, and what they say is true."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.contract import TierContract

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"custom_tier": "xxhash", "two_processes": "msgspec", "transformers_chat": "transformers"}
SAYS = {
    "tiny_scheduler": ("12 requests", "2112 of 2880 prompt tokens were found", "full: 0 pages held"),
    "own_attention_kind": ("two_chunks holds  8 of 32 pages", "goes on from 896"),
    "plan_fleet": ("llama-3.1-70b", "deepseek-v3"),
    "custom_tier": ("the first process finds 0 of 2000", "the next one finds 1792 of 2000"),
    "two_processes": ("first: 0 of 4,000 tokens", "second: 3,840 of 4,000 tokens"),
    "transformers_chat": ("0 of 1,195 prompt tokens reused", "1,024 of 1,195 prompt tokens reused (1,024 of them"),
}


def imported(name: str) -> Any:
    return importlib.import_module(f"examples.{name}")


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_what_it_should(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "numpy"))
    program = (sys.executable, str(EXAMPLES / f"{name}.py"))
    run = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    for words in SAYS[name]:
        assert words in run.stdout


@pytest.mark.parametrize("memory", ["4KiB", "16KiB"])
def test_the_tiny_scheduler_generates_what_a_loop_without_a_cache_does(memory: str) -> None:
    """4 KiB hold too little for all at once: requests are preempted, and resume."""
    toy = imported("tiny_scheduler")
    rng = np.random.default_rng(1)
    system = rng.integers(0, toy.VOCABULARY, 100).tolist()
    requests = [toy.Request(system + rng.integers(0, toy.VOCABULARY, 90).tolist(), 40) for _ in range(10)]
    engine = toy.Engine(memory)
    engine.run(requests)
    assert bool(engine.preemptions) == (memory == "4KiB")
    for request in requests:
        tokens = np.array(request.tokens)
        for token in request.answer:
            products = tokens * np.arange(1, len(tokens) + 1)
            window = products[max(0, len(tokens) - toy.WINDOW + 1) :]
            assert token == int(products.sum() + window.sum()) % toy.VOCABULARY
            tokens = np.append(tokens, token)


def test_a_kind_of_ones_own_needs_its_chunk_and_the_one_before() -> None:
    reach = imported("own_attention_kind").TwoChunks(8)
    brute = [next(t for t in range(p + 1) if t // 8 >= p // 8 - 1) for p in range(100)]
    assert [reach.tail(p) for p in range(100)] == brute
    assert reach.tail(np.arange(100)).tolist() == brute


class TestSqliteTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Any:
        return imported("custom_tier").SqliteTier(tmp_path / "kv.sqlite")
