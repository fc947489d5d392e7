"""Which models can be served: the layers of our spec, matched with the cache layers that transformers would make."""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from kvweave.errors import CannotServe, ConfigError
from kvweave.integrations.transformers.model_changes import modules_of
from kvweave.integrations.transformers.stored_spec import stored_spec
from kvweave.spec import LayerCache, ModelSpec
from kvweave.spec.hf import from_config

CACHE_NAMES = ("past_key_values", "cache_params")
"""Names of the cache argument of a model's forward."""


REFUSED = {
    "cpmant": "it puts tokens of its own before each prompt, of which no input tells",
    "moshi": "its cache is a window and its mask is not, so what a prompt sees depends on how it was cut",
    "musicgen_decoder": "a row is four codebooks: its prompts are no lists of tokens",
    "musicgen_melody_decoder": "a row is four codebooks: its prompts are no lists of tokens",
    "prophetnet": "it takes one token at a time once it has a cache",
    "unlimited_ocr_text": "its window begins where the prompt ends, so an answer is no prefix of the next prompt",
}
"""By model type, why a family cannot be served: its cache depends on more than the tokens."""

SCANS_AFRESH = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types whose scan over several tokens ignores the state in the cache; only single tokens continue from it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One layer of transformers' cache: the model layer that fills it, the caches of our spec, and transformers' own
    layer."""

    layer: int
    caches: tuple[LayerCache, ...]
    reference: Any


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can be served: its spec, what of it a store keeps, the layers of its cache, and what its forward
    accepts."""

    spec: ModelSpec
    stored: ModelSpec
    entries: tuple[Entry, ...]
    cache_name: str
    own_cache: type | None
    takes_positions: bool
    takes_logits_to_keep: bool
    takes_chosen_logits: bool
    """Whether `logits_to_keep` may be a tensor of places."""
    scans_afresh: bool

    @property
    def has_states(self) -> bool:
        return any(not cache.reach.per_token for _, cache in self.spec.caches())


def wrapped(model: Any) -> list[Any]:
    """A model and the models that it wraps, outermost first: a PeftModel, a wrapper of `torch.compile`, the model
    itself."""
    models = [model]
    while True:
        if "_orig_mod" in getattr(model, "_modules", {}):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            check_adapters(model)
            model = model.get_base_model()
        else:
            return models
        models.append(model)


def uncompiled(model: Any) -> AbstractContextManager[Any]:
    """Within this context, `model.compile()`, and `torch.compile` of its forward or of a module inside, have no effect:
    compiled code cannot follow pages."""
    if not any(map(_is_compiled, modules_of(model))):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _is_compiled(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def check_adapters(model: Any) -> None:
    """Refuse PEFT adapters whose effect on a token depends on more than the tokens before it."""
    for name, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise CannotServe(type(model).__name__, f"adapter {name!r} puts tokens of its own before each prompt")
        if getattr(config, "alora_invocation_tokens", None):
            raise CannotServe(type(model).__name__, f"adapter {name!r} (aLoRA) begins in the midst of a prompt")


def examine(model: Any) -> Served:
    """Examine a model; raises `CannotServe` with the reason."""
    name = type(model).__name__
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise CannotServe(
            name, "it is no transformers model that generates: load one, for example by AutoModelForCausalLM"
        )
    config = model.config
    accepted = inspect.signature(model.forward).parameters
    cache_name = next((known for known in CACHE_NAMES if known in accepted), None)
    if cache_name is None:
        raise CannotServe(name, f"its forward takes no cache ({', '.join(CACHE_NAMES)})")
    text = config.get_text_config(decoder=True)
    if text.model_type in REFUSED:
        raise CannotServe(name, REFUSED[text.model_type])
    if config.is_encoder_decoder:
        raise CannotServe(name, "an encoder's output is part of its past, and has no tokens to be found by")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise CannotServe(name, "its attention is bidirectional: a prefix depends on what follows it")
    try:
        spec = from_config(config, store="transformers", dtype=str(model.dtype).removeprefix("torch."))
    except ConfigError as error:
        raise CannotServe(name, str(error)) from error
    own_cache = _own_cache(model)
    entries = _entries(name, spec, own_cache() if own_cache else DynamicCache(config=text))
    return Served(
        spec,
        stored_spec(spec, config),
        entries,
        cache_name,
        own_cache,
        takes_positions="position_ids" in accepted,
        takes_logits_to_keep="logits_to_keep" in accepted,
        takes_chosen_logits="logits_to_keep" in accepted and "Tensor" in str(accepted["logits_to_keep"].annotation),
        scans_afresh=text.model_type in SCANS_AFRESH,
    )


def _own_cache(model: Any) -> type | None:
    """The cache class that a model's module defines, if the model accepts no other."""
    if model._supports_default_dynamic_cache():
        return None
    for value in vars(sys.modules[type(model).__module__]).values():
        if (
            isinstance(value, type)
            and issubclass(value, TransformersCache)
            and value.__module__ == type(model).__module__
        ):
            return value
    raise CannotServe(type(model).__name__, "its state is of its own kind, not a Cache")


def _entries(name: str, spec: ModelSpec, cache: Any) -> tuple[Entry, ...]:
    """One entry for each layer, or for each cache where layers have several; layers at the end that only read have
    none."""
    references = list(cache.layers)
    keeping = [(index, cache) for index, cache in spec.caches()]
    if not references:
        return tuple(Entry(i, layer.caches, _general(layer.caches)) for i, layer in enumerate(spec.layers))
    if len(references) > len(spec.layers) and len(references) == len(keeping):
        return tuple(Entry(i, (own,), reference) for (i, own), reference in zip(keeping, references, strict=True))
    beyond = [i for i, layer in enumerate(spec.layers) if i >= len(references) and layer.caches]
    if len(references) > len(spec.layers) or beyond:
        raise CannotServe(
            name, f"transformers' cache has {len(references)} layers, its config tells of {len(spec.layers)}"
        )
    return tuple(Entry(i, spec.layers[i].caches, reference) for i, reference in enumerate(references))


def _general(caches: tuple[LayerCache, ...]) -> Any:
    """The layer that transformers would make for such caches, for models whose own cache class makes layers later."""
    return DynamicLayer() if any(cache.reach.per_token for cache in caches) else LinearAttentionLayer()
