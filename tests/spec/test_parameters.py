"""Parameters counted from a config: as many as transformers would make, within a few percent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave.cli.read_config import example_names, read_config
from kvweave.errors import ConfigError
from kvweave.spec.hf.fields import SAME_AS, family_of, language_model
from kvweave.spec.hf.parameters import count_parameters

PUBLISHED = {
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "qwen3-32b": 32.8,
    "mistral-7b-v0.1": 7.24,
    "phi-3-mini": 3.82,
    "qwen3-next-80b": 79.7,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
}
"""Billions, as their authors give them."""
UNCOUNTED = ("longcat-flash", "recurrent-gemma-9b", "zamba2-7b")


def full_config(name: str) -> Any:
    """The example with the fields that it leaves out, as transformers assumes them; None for types that it lacks."""
    given = language_model(read_config(name))
    kind = family_of(given)
    known = kind if kind in CONFIG_MAPPING else SAME_AS.get(kind)
    fields = {key: value for key, value in given.items() if key != "model_type"}
    return AutoConfig.for_model(known, **fields).get_text_config(decoder=True) if known in CONFIG_MAPPING else None


CONFIGS = {name: config for name in example_names() if name not in UNCOUNTED and (config := full_config(name))}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_it_counts_what_transformers_makes(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    made = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(CONFIGS[name].to_dict()) == pytest.approx(made, rel=0.05)


def test_most_examples_can_be_counted() -> None:
    assert len(CONFIGS) >= 49


@pytest.mark.parametrize("name", PUBLISHED)
def test_examples_with_all_their_widths_count_what_is_published(name: str) -> None:
    assert count_parameters(read_config(name)) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"vocab_size": None, "intermediate_size": None}, "lacks vocab_size and intermediate_size"),
    ],
)
def test_widths_that_no_default_could_stand_for_are_named(change: dict[str, Any], words: str) -> None:
    config = {key: value for key, value in read_config("llama-3.1-8b").items() if key not in change}
    with pytest.raises(ConfigError, match=words):
        count_parameters(config)


@pytest.mark.parametrize("name", UNCOUNTED)
def test_families_that_are_built_in_another_way_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not built as others are"):
        count_parameters(read_config(name))
