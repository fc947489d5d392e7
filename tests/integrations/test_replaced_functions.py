"""The functions that update states: ours for forwards on pages, the model's own for all others, and afterwards."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kvweave.integrations.transformers import KVWeave, replaced_functions
from tests.integrations.models import model_of, plain, prompt

RULES = {
    "torch_recurrent_gated_delta_rule": "gated_delta_rule",
    "recurrent_kimi_delta_attention": "gated_delta_rule",
    "mamba_selective_state_update": "selective_state",
    "mamba2_selective_state_update": "selective_state",
    "causal_conv1d_update": "causal_convolution",
}
NAMES = tuple(RULES)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What C has computed."""
    noted: list[str] = []

    def note(name: str) -> None:
        compute = getattr(replaced_functions, name)

        def noting(*given: Any, **how: Any) -> Any:
            found = compute(*given, **how)
            noted.extend([name] if found is not None else [])
            return found

        monkeypatch.setattr(replaced_functions, name, noting)

    for name in set(RULES.values()):
        note(name)
    return noted


def functions(model: Any) -> dict[str, Any]:
    module = vars(sys.modules[type(model).__module__])
    return {name: module[name] for name in NAMES if name in module}


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2", "kimi_linear", "falcon_h1", "jamba", "mamba", "zamba2"],
)
def test_answers_are_those_of_transformers(name: str, calls: list[str]) -> None:
    model, ids = model_of(name), prompt(20)
    right, own = plain(model, ids, num_tokens=8).sequences, functions(model)
    assert own
    with KVWeave(model, "32MiB", rows=8, max_tokens=256) as weave:
        calls.clear()
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(weave.generate(ids, **options), right)
        assert set(calls) == {RULES[name] for name in own}
        calls.clear()
        assert torch.equal(plain(model, ids, num_tokens=8).sequences, right)
        assert not calls, "without pages the model computes with its own"
    assert functions(model) == own


def test_models_of_one_family_may_be_closed_in_any_order() -> None:
    model = model_of("qwen3_next")
    own = functions(model)
    first, second = (KVWeave(model, "32MiB", rows=8, max_tokens=256) for _ in range(2))
    first.close()
    assert all(ours.__wrapped__ is own[name] for name, ours in functions(model).items())
    second.close()
    second.close()
    assert functions(model) == own


def test_a_function_that_computes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_next")
    own, module = functions(model), sys.modules[type(model).__module__]
    monkeypatch.setattr(module, NAMES[-1], lambda *given: own[NAMES[-1]](*given) + 1)
    monkeypatch.setattr(module, NAMES[0], lambda *_: None)
    changed = functions(model)
    with KVWeave(model, "32MiB", rows=8, max_tokens=256):
        assert functions(model) == changed
    assert functions(model) == changed


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_on_gathered_rows_the_bits_are_those_of_transformers(name: str, calls: list[str]) -> None:
    model, ids = model_of(name), prompt(20)
    with KVWeave(model, "32MiB", rows=8, max_tokens=256, in_place=False) as weave:
        calls.clear()
        weave.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert not calls
