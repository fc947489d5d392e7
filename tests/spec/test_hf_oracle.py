"""The oracle nobody here wrote: bytes predicted from a config are the bytes that transformers' caches hold.

Every causal-LM family of the installed transformers is built tiny with random weights and run. What we say of its
config under transformers' conventions must equal, layer by layer and at every length, what its cache then holds.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvweave import from_config
from kvweave.spec.hf import fields
from tests.oracle import tiny

MEASURED = tuple(name for name in tiny.NAMES if ":" not in name)
"""Families; the other names are variants of them."""

EXTRA_TOKENS = {"cpmant": 3}
"""Tokens that a model puts before the prompt: CPM-Ant's soft prompt, `prompt_length` of them."""

STEPS = 3
DECODED = 37


ENTRY_A_CACHE = {"longcat_flash"}
"""Families whose layers have several caches, and as many entries in transformers' list of them."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def model_of(name: str) -> Any:
    return tiny.tiny_model(name)


def predicted(name: str, length: int) -> list[int]:
    spec = from_config(tiny.tiny_config(name), store="transformers", dtype=str(model_of(name).dtype).split(".")[1])
    tokens = length + EXTRA_TOKENS.get(name.partition(":")[0], 0)
    if name in ENTRY_A_CACHE:
        return [cache.bytes_at(tokens) for _, cache in spec.caches()]
    return [sum(cache.bytes_at(tokens) for cache in layer.caches) for layer in spec.layers]


def held(name: str, cache: Any, num_layers: int) -> list[int]:
    """Bytes by layer; layers at the end that keep nothing of their own have no entry in some caches."""
    found = [sum(tensor.nbytes for tensor in layer.values()) for layer in tiny.facts(model_of(name), cache)]
    return found + [0] * (num_layers - len(found))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_cache_of_a_real_forward_holds_the_bytes_we_predict(name: str) -> None:
    for length in tiny.LENGTHS:
        expected = predicted(name, length)
        assert any(expected)
        assert held(name, tiny.prefill(name, model_of(name), length), len(expected)) == expected, f"{length} tokens"
    expected = predicted(name, DECODED)
    cache = tiny.decode(name, model_of(name), DECODED, STEPS)
    assert held(name, cache, len(expected)) == expected, f"{DECODED} tokens, the last {STEPS} one by one"


def test_families_are_measured_not_only_listed() -> None:
    """183 with transformers 5.22: 174 of the registry's 183, and 9 whose text decoder has no twin in it."""
    assert len(MEASURED) == len(set(MEASURED)) >= 170
    assert len(tiny.NAMES) - len(MEASURED) >= 40, "variants"
    assert len(set(tiny.LENGTHS)) >= 3


def test_no_causal_lm_of_transformers_is_neither_measured_nor_excluded() -> None:
    unplanned = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in tiny.EXCLUDED:
            continue
        if model_type not in MEASURED:
            unplanned.append(f"{model_type}: not measured")
        try:
            notes = from_config(tiny.tiny_config(model_type), store="transformers").notes  # a decoder alone
        except Exception as error:
            unplanned.append(f"{model_type}: {error!r}")
            continue
        if any("is not known here" in note for note in notes):
            unplanned.append(f"{model_type}: known by the general rule only; run scripts/hf_defaults.py")
    assert not unplanned, "\n".join(["families that we cannot plan:", *unplanned])


def test_every_exclusion_has_a_reason_and_is_still_a_family() -> None:
    for model_type, reason in tiny.EXCLUDED.items():
        assert model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, f"{model_type} has left transformers"
        assert len(reason) > 20
    assert len(tiny.EXCLUDED) < 15


def script(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    loader = importlib.util.spec_from_file_location(name, path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def test_the_defaults_that_travel_with_us_are_those_of_transformers() -> None:
    ours = json.loads((Path(fields.__file__).parent / "defaults.json").read_text())
    theirs = script("hf_defaults").collect()
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == set()
