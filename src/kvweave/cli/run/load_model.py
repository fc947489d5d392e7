"""The model to run: a local directory, or a small one with random weights in the shape of an example. No network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave.cli.read_config import read_config
from kvweave.cli.run.scale import Scale, changes, layers_that_show, pattern
from kvweave.cli.run.text import ByteTokenizer, TextCodec, Tokenizer
from kvweave.errors import ConfigError, NoDevice, UnknownName
from kvweave.spec.hf import from_config
from kvweave.spec.hf.fields import SAME_AS, family_of, language_model

DTYPES = ("auto", "float32", "bfloat16", "float16")
_POWERS = tuple(2**power for power in range(10))
DIVISORS = (*_POWERS, *sorted(odd * power for odd in (3, 5, 7) for power in _POWERS[:7]))
"""Powers of two divide most sizes; others are for those that have odd factors, as 112 heads do."""
TRIED_TOKENS = 8
_MISFITS = (ValueError, RuntimeError, AssertionError, TypeError, ArithmeticError, LookupError, StrictDataclassError)
"""How a family says that some of its sizes do not fit one another."""
STRONG = 0.7
"""The spread of weights of width 1: so large that the tokens of a random model depend on its whole prompt."""
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMbBgG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can generate, its tokenizer, and a description of it."""

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
        raise NoDevice("no CUDA device is available; run without --device cuda")
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"--seed {seed}: a seed has 64 bits")
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
    config = _config(source, read_config(source))
    model, scale = _scaled(source, config, most, dtype, seed)
    name = f"{Path(source).name.removesuffix('.json')} scaled to {_millions(model)}"
    return LoadedModel(name, model, ByteTokenizer(), _about(config, model.config, scale, seed))


def _millions(model: Any) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count / 1e6:.0f}M" if count >= 10**7 else f"{count / 1e6:.1f}M"


def _untie(model: Any) -> None:
    """An output layer of its own: with tied embeddings, a model with random weights repeats the last token."""
    said, heard = model.get_output_embeddings(), model.get_input_embeddings()
    if said.weight is heard.weight:
        said.weight = torch.nn.Parameter(torch.randn_like(said.weight) * heard.weight.std())


def _config(source: str, given: Mapping[str, Any]) -> Any:
    """The language model's config, with transformers' defaults where the example says nothing."""
    fields = dict(given if given.get("model_type") in CONFIG_MAPPING else language_model(given))
    kind = fields.pop("model_type", "") or family_of(fields)
    known = kind if kind in CONFIG_MAPPING else SAME_AS.get(kind)
    if known not in CONFIG_MAPPING:
        raise ConfigError(
            f"{source}: this transformers has no model of type {kind!r}; `kvweave plan` can still plan it"
        )
    try:
        return AutoConfig.for_model(known, **fields).get_text_config(decoder=True)
    except _MISFITS as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{source}: transformers refuses this config: {said[:300]}") from error


def _scaled(source: str, config: Any, most: int, dtype: str, seed: int) -> tuple[Any, Scale]:
    """A model by the first divisor that keeps within `most` parameters, keeps the pattern, and makes one that runs."""
    kinds = pattern(from_config(config, store="transformers"))
    layers = layers_that_show(kinds)
    larger: list[tuple[int, Any]] = []
    for number, divisor in enumerate(DIVISORS):
        if number == len(_POWERS) == len(larger):
            break  # the largest power of two leaves too much, so all others do
        scale = Scale(divisor, layers, len(kinds))
        try:
            scaled = _remade(config, scale)
            size = _num_parameters(scaled)
            if size > most:
                larger.append((size, scaled))
            elif pattern(from_config(scaled, store="transformers")) == kinds[:layers]:
                return _running(scaled, dtype, seed), scale
        except _MISFITS:
            continue
    raise ConfigError(f"{source}: cannot be scaled down to {most:,} parameters: {_least(larger)}")


def _least(larger: list[tuple[int, Any]]) -> str:
    """What to ask for instead: the smallest of some configs that makes a model that runs."""
    for size, scaled in sorted(larger, key=lambda entry: entry[0]):
        try:
            _running(scaled, "float32", 0)
        except _MISFITS:
            continue
        return f"{size:,} is the least, give --size {-(-size // 10**5) / 10:g}M"
    return "no smaller sizes of its parts fit one another"


def _running(config: Any, dtype: str, seed: int) -> Any:
    """A model with random weights that answered once. Raises one of `_MISFITS` where its sizes do not fit."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **({} if dtype == "auto" else {"dtype": getattr(torch, dtype)}))
    _untie(model)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end: random weights end anywhere, or nowhere
    with torch.inference_mode():
        model.eval()(torch.arange(1, 1 + TRIED_TOKENS)[None])
    return model


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
