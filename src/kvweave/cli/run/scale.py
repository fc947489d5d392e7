"""A model's config made small: every width divided by one number, fewer experts and layers, the layer pattern kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.spec import ModelSpec
from kvweave.spec.role import align_up

BYTES_VOCABULARY = 320
"""Tokens of a model that reads bytes: 256, and room for padding, start and end."""
FEWEST_LAYERS = 4
MULTIPLE = 16
"""What inner widths are rounded up to, for kernels that read many numbers at once."""

_WIDTH = re.compile(r"(hidden_size|embedding_size|d_model|d_inner|n_embd|mamba_d_ssm|lru_width|_per_layer_input)$")
_INNER = re.compile(r"(intermediate_size|intermediate_size_mlp|ffn_hidden_size|ffn_dim|lora_rank)$")
_HEADS = re.compile(r"(_heads|n_head|(^|_)n_?groups)$")
_EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts)$")
_CHOSEN = re.compile(r"(num_experts_per_tok(en)?|moe_topk|moe_k)$")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_GROUPS = ("n_group", "topk_group", "num_expert_group")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DROPPED = ("per_layer_config",)
"""Fields that transformers makes out of others, by layer number."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Widths and heads divided by `divisor`, the first `layers` layers, few experts, and tokens that are bytes."""

    divisor: int
    layers: int
    was_layers: int

    def __call__(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the small model; fields that are not sizes stay as they are."""
        return {name: self._field(name, value) for name, value in config.items() if name not in _DROPPED}

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and name.endswith(("attn_config", "attention_config")):
            return self(value)
        if isinstance(value, list):
            return self._per_layer(name, value)
        if name in _VOCABULARIES:
            return BYTES_VOCABULARY
        if name in _TOKENS:
            return _TOKENS[name]
        if _CHOSEN.search(name):
            return min(value or 2, 2)
        if isinstance(value, int) and not isinstance(value, bool):
            return self._number(name, value)
        return value

    def _number(self, name: str, value: int) -> int:
        if name in _LAYERS:
            return self.layers
        if name in _GROUPS:
            return min(value, 1)
        if name == "num_kv_shared_layers":
            return max(0, value - (self.was_layers - self.layers))
        if _EXPERTS.search(name):
            return min(value, 8)
        if _INNER.search(name):
            return align_up(-(-value // self.divisor), MULTIPLE)
        is_width = _WIDTH.search(name) or _HEADS.search(name)
        return max(1, value // self.divisor) if is_width and value else value

    def _per_layer(self, name: str, values: list[Any]) -> list[Any]:
        """Lists with an entry a layer are cut; so are lists of layers."""
        if len(values) == self.was_layers:
            return values[: self.layers]
        if re.search(r"layer|idx|indices", name) and all(isinstance(value, int) for value in values):
            return [value for value in values if value < self.layers]
        return values


def pattern(spec: ModelSpec) -> list[tuple[str, ...]]:
    """What each layer keeps, by tag."""
    return [tuple(cache.tag for cache in layer.caches) for layer in spec.layers]


def layers_that_show(kinds: list[tuple[str, ...]]) -> int:
    """The fewest first layers in which each kind comes twice, or as often as it ever does."""
    often = {kind: min(2, kinds.count(kind)) for kind in kinds}
    for count in range(min(FEWEST_LAYERS, len(kinds)), len(kinds)):
        if all(kinds[:count].count(kind) >= times for kind, times in often.items()):
            return count
    return len(kinds)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """The numbers that became others: name, before, after."""
    return [
        (name, value, after[name])
        for name, value in before.items()
        if isinstance(value, int) and isinstance(after.get(name), int) and after[name] != value and name not in _TOKENS
    ]
