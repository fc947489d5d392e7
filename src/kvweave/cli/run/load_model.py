"""The model to run: a local directory, or a small one with random weights in the shape of an example. No network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave.cli.run.scale import Scale, changes, layers_that_show, pattern
from kvweave.cli.run.text import ByteTokenizer, TextCodec, Tokenizer
from kvweave.cli.source import read_config
from kvweave.errors import ConfigError, NoDevice, UnknownName
from kvweave.spec.hf import from_config
from kvweave.spec.hf.fields import SAME_AS, language_model

DTYPES = ("auto", "float32", "bfloat16", "float16")
DIVISORS = tuple(2**power for power in range(10))
STRONG = 0.7
"""The spread of weights of width 1. So much that what a random model says depends on all that it was told."""
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMbBgG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can generate, how to write to it, and what there is to know of it."""

    name: str
    model: Any
    text: TextCodec
    about: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")


def load(source: str, *, size: str, dtype: str, device: str, seed: int) -> LoadedModel:
    """The model in the directory `source`; else one of at most `size` random parameters, of the config `source`."""
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise UnknownName("device", device, ("cpu", "cuda"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise NoDevice("there is no CUDA device here; run without --device cuda")
    kept = "float32" if dtype == "auto" and device == "cpu" else dtype
    found = _directory(source, kept) if Path(source).is_dir() else _random(source, parse_count(size), kept, seed)
    found.model.to(device).eval()
    return found


def parse_count(text: str) -> int:
    """`"40M"` -> 40000000."""
    match = _COUNT.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"cannot read {text!r} as a number of parameters; write for example 40M")
    return int(float(match[1]) * _UNITS[match[2].lower()])


# ---- a directory


def _directory(source: str, dtype: str) -> LoadedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)
        text, about = _tokenizer(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        said = " ".join(str(error).split())
        hint = f"; a random model of its shape: kvweave run {Path(source) / 'config.json'}" if _is_bare(source) else ""
        raise ConfigError(f"cannot load a causal language model from {source!r}: {said[:300]}{hint}") from error
    return LoadedModel(Path(source).resolve().name, model, text, about)


def _is_bare(source: str) -> bool:
    """Whether a directory has a config and no weights."""
    files = {path.suffix for path in Path(source).iterdir()}
    return (Path(source) / "config.json").is_file() and not files & {".safetensors", ".bin"}


def _tokenizer(source: str) -> tuple[TextCodec, tuple[str, ...]]:
    """The tokenizer beside a model; where there is none, transformers would make up an empty one."""
    if any(path.name.startswith(_TOKENIZER_FILES) for path in Path(source).iterdir()):
        return Tokenizer(AutoTokenizer.from_pretrained(source, local_files_only=True)), ()
    return ByteTokenizer(), (f"there is no tokenizer in {source}: a token is a byte",)


# ---- an example


def _random(source: str, most: int, dtype: str, seed: int) -> LoadedModel:
    given = read_config(source)
    config = _config(source, given)
    scaled, scale = _scaled(source, config, most)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(scaled, **({} if dtype == "auto" else {"dtype": getattr(torch, dtype)}))
    _untie(model)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end: random weights end anywhere, or nowhere
    name = f"{Path(source).name.removesuffix('.json')} scaled to {_millions(model)}"
    return LoadedModel(name, model, ByteTokenizer(), _about(config, scaled, scale, seed))


def _millions(model: Any) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count / 1e6:.0f}M" if count >= 10**7 else f"{count / 1e6:.1f}M"


def _untie(model: Any) -> None:
    """An output of its own: random models whose output is their input say again what they heard last."""
    said, heard = model.get_output_embeddings(), model.get_input_embeddings()
    if said.weight is heard.weight:
        said.weight = torch.nn.Parameter(torch.randn_like(said.weight) * heard.weight.std())


def _config(source: str, given: Mapping[str, Any]) -> Any:
    """The language model's config, with transformers' defaults where the example says nothing."""
    fields = dict(given if given.get("model_type") in CONFIG_MAPPING else language_model(given))
    kind = fields.pop("model_type", "")
    known = kind if kind in CONFIG_MAPPING else SAME_AS.get(kind)
    if known not in CONFIG_MAPPING:
        raise ConfigError(
            f"{source}: this transformers has no model of type {kind!r}; `kvweave plan` can still plan it"
        )
    return AutoConfig.for_model(known, **fields).get_text_config(decoder=True)


def _scaled(source: str, config: Any, most: int) -> tuple[Any, Scale]:
    """The config with the smallest divisor that keeps within `most` parameters."""
    kinds = pattern(from_config(config, store="transformers"))
    layers = layers_that_show(kinds)
    smallest = 0
    for divisor in DIVISORS:
        scale = Scale(divisor, layers, len(kinds))
        scaled = _remade(config, scale)
        try:
            smallest = _num_parameters(scaled)
        except (ValueError, RuntimeError, AssertionError, TypeError, ZeroDivisionError):
            break  # some sizes of the family no longer fit one another
        if smallest <= most and pattern(from_config(scaled, store="transformers")) == kinds[:layers]:
            return scaled, scale
    raise ConfigError(
        f"{source}: cannot be scaled down to {most:,} parameters"
        + (f"; {smallest:,} is the least: give --size" if smallest else "")
    )


def _remade(config: Any, scale: Scale) -> Any:
    fields = scale(config.to_dict())
    fields.pop("architectures", None)
    return type(config).from_dict({**fields, "initializer_range": STRONG / math.sqrt(fields["hidden_size"])})


def _num_parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def _about(config: Any, scaled: Any, scale: Scale, seed: int) -> tuple[str, ...]:
    """What was scaled, exactly."""
    sizes = [f"{name} {was:,} -> {now:,}" for name, was, now in changes(config.to_dict(), scaled.to_dict())]
    return (
        f"random weights (seed {seed}); a token is a byte; answers are noise",
        f"scaled: widths and heads / {scale.divisor}, the first {scale.layers} of {scale.was_layers} layers, so that"
        f" the layer pattern is kept: {', '.join(sizes)}",
    )
