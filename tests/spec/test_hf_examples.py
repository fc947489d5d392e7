"""Every bundled example against figures worked out by hand, apart from our code: tests/data/examples_expected.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvweave import from_config, make_plan
from kvweave.spec import ModelSpec

CONFIGS = {
    Path(str(path)).stem: path for path in (files("kvweave") / "examples").iterdir() if path.name[-5:] == ".json"
}
EXPECTED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "examples_expected.json").read_text()
)
WORDS = {"notes", "public_figures", "work"}

FIGURES: dict[str, Callable[[str], Fraction | int]] = {
    "num_layers": lambda name: spec(name).num_layers,
    "cache_layers": lambda name: sum(len(layer.caches) for layer in spec(name).layers),
    "bytes_per_token": lambda name: spec(name).bytes_per_token(),
    "bytes_per_token_fp8": lambda name: spec(name, "fp8").bytes_per_token(),
    "window_bytes_per_sequence": lambda name: spec(name).window_bytes(),
    "window_bytes_per_sequence_fp8": lambda name: spec(name, "fp8").window_bytes(),
    "state_bytes_per_sequence": lambda name: spec(name).state_bytes(),
    "bytes_per_token_fp8_paged256": lambda name: paged_bytes_per_token(name, 256),
    # conventions other than ours, by arithmetic from ours
    "window_bytes_per_sequence_w128": lambda name: spec(name).window_bytes() * 128 // 129,
    "state_bytes_per_sequence_bf16_conv": lambda name: spec(name).state_bytes() // 2,
}


def spec(name: str, dtype: str = "auto") -> ModelSpec:
    return from_config(str(CONFIGS[name]), dtype=dtype)


def paged_bytes_per_token(name: str, block_tokens: int) -> Fraction:
    """In whole pages of so many tokens, as vLLM pads them: each role to a multiple of 576 bytes, one kernel block."""
    growing = [cache for _, cache in spec(name, "fp8").caches() if cache.reach.span is None]
    pages = [
        -(-role.row_bytes * (block_tokens // role.tokens_per_row) // 576) * 576
        for cache in growing
        for role in cache.roles
    ]
    return Fraction(sum(pages), block_tokens)


def test_every_example_has_its_figures_and_every_figure_its_example() -> None:
    assert EXPECTED.keys() == CONFIGS.keys()
    assert len(EXPECTED) >= 50


def test_every_figure_is_compared() -> None:
    assert {key for figures in EXPECTED.values() for key in figures} - WORDS == FIGURES.keys()


@pytest.mark.parametrize(
    ("name", "figure"), [(name, key) for name, figures in EXPECTED.items() for key in figures if key not in WORDS]
)
def test_an_example_is_what_was_worked_out_by_hand(name: str, figure: str) -> None:
    assert FIGURES[figure](name) == EXPECTED[name][figure]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_plan_says_the_same_as_the_spec(name: str) -> None:
    read = spec(name)
    made = make_plan(read, "640GiB")
    assert made.bytes_per_token() == read.bytes_per_token()
    assert made.window_bytes() == read.window_bytes()
    assert made.state_bytes() == read.state_bytes()
    assert made.num_layers == read.num_layers


def test_the_work_beside_a_figure_comes_to_the_figure() -> None:
    for name, figures in EXPECTED.items():
        for key, work in figures["work"].items():
            assert eval(work.partition("#")[0], {"__builtins__": {}}) == figures[key], (name, key)
