"""`context=`: a sequence of that length runs, alone, in the smallest memory that the plan accepts for it.

Whatever came before: prompts that leave points, that share half of what another said, that are asked again. Prompts
are cut as an engine does it: into steps as long as pages allow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvweave
from kvweave import Cache, make_plan
from kvweave.cache import Sequence
from kvweave.errors import ConfigError, NeverFits
from kvweave.plan import Parallel
from kvweave.prefix import Retention
from kvweave.spec import DType, Layer, LayerCache, ModelSpec, Role, Window
from kvweave.spec.hf import from_config

EXAMPLES = Path(kvweave.__file__).parent / "examples"
NAMES = (
    "gemma-3-27b", "gpt-oss-120b", "qwen3-next-80b", "deepseek-v4-flash", "llama-4-scout",
    "inkling", "mimo-v2-flash",  # with Gemma 3: several pages of a window share a super-page, and scatter
)  # fmt: skip
ANSWER = 8


def spec_of(name: str) -> ModelSpec:
    return from_config(json.loads((EXAMPLES / f"{name}.json").read_text()), store="transformers")


def smallest(spec: ModelSpec, length: int) -> int:
    with pytest.raises(NeverFits) as told:
        make_plan(spec, 1, layout="layer_major", context=length)
    return told.value.smallest_bytes


def run(cache: Cache, tokens: Any) -> None:
    """All but the last tokens as a prompt, then one at a time."""
    with cache.open(tokens[:-ANSWER]) as sequence:
        while (left := len(tokens) - ANSWER - sequence.length) > 0:
            most = min(left, 4096, (sequence.stop or len(tokens)) - sequence.length)
            while most > 1 and not cache.can_extend(sequence, most):
                most = -(-most // 2)
            step(cache, sequence, most)
        for token in tokens[-ANSWER:]:
            step(cache, sequence, 1, [token])


def test_windows_that_ranks_divide_run_on_each_of_them() -> None:
    cache = LayerCache("window", Window(17), (Role("key", (8,), DType.FLOAT16),), context_split=True)
    for rank in range(3):
        sizes: dict[str, Any] = {"block_tokens": 33, "parallel": Parallel(cp=3, cp_rank=rank), "context": 100}
        with pytest.raises(NeverFits) as told:
            make_plan(ModelSpec("window", (Layer((cache,)),)), 1, **sizes)
        plan = make_plan(ModelSpec("window", (Layer((cache,)),)), told.value.smallest_bytes, **sizes)
        run(Cache(plan), np.ones(100, np.int32))


def step(cache: Cache, sequence: Sequence, count: int, tokens: Any = None) -> None:
    list(cache.extend(sequence, count, tokens=tokens))
    list(cache.commit(sequence))


def check(name: str, length: int, prompts: int) -> None:
    spec, random = spec_of(name), np.random.default_rng(length)
    plan = make_plan(spec, smallest(spec, length), layout="layer_major", context=length)
    cache = Cache(plan, retention=Retention(decode_every=16))
    tokens = random.integers(0, 1000, length)
    for _ in range(prompts):
        run(cache, tokens)
        part = int(random.integers(length))
        tokens = np.concatenate([tokens[:part], random.integers(0, 1000, length - part)])
    assert cache.stats().sequences == 0


@pytest.mark.parametrize("length", [100, 1025, 2000, 4097, 9000])
@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_as_long_as_the_context_runs_in_the_smallest_memory(name: str, length: int) -> None:
    check(name, length, prompts=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.json")))
def test_on_every_geometry_many_prompts_as_long_as_the_context(name: str) -> None:
    try:
        spec_of(name)
    except ConfigError:
        pytest.skip("it needs a draft's base model")
    for length in (777, 3000, 6001, 20000):
        check(name, length, prompts=12)
