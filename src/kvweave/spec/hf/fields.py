"""A config.json as fields: nested, renamed, null, missing or differing by layer, and still one question away."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvweave.errors import ConfigError

NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
"""Where multimodal configs keep the language model."""

MOST_LAYERS = 10_000
"""More layers than any model has: anything above is a mistake, and would take all memory."""
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "hidden_size": ("n_embd", "d_model", "embed_dim", "dim"),
    "num_attention_heads": (
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
        "attention_heads",
        "num_decoder_attention_heads",
    ),
    "num_key_value_heads": (
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_attention_groups",
        "attn_config.kv_n_heads",
    ),
    "head_dim": ("attention_head_dim", "dim_head", "kv_channels"),
    "sliding_window": ("sliding_window_size", "attention_window_size"),
    "max_position_embeddings": ("model_max_length", "n_positions", "max_sequence_length", "seq_length", "max_seq_len"),
    "dtype": ("torch_dtype",),
    "num_draft_layers": ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
    # Mamba: one idea, four spellings
    "mamba_heads": ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
    "mamba_head_dim": ("mamba_d_head", "mamba_headdim", "head_dim"),
    "mamba_groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "mamba_state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "mamba_conv": ("mamba_d_conv", "conv_kernel"),
    "mamba_expand": ("expand",),
    # KDA and gated delta nets
    "linear_num_heads": ("linear_attn_config.num_heads", "num_attention_heads"),
    "linear_head_dim": ("linear_attn_config.head_dim", "head_dim"),
    "linear_conv_kernel_dim": ("linear_attn_config.short_conv_kernel_size", "short_conv_kernel_size"),
    "index_head_dim": ("indexer_head_dim", "sparse_attention_config.sparse_index_dim"),
    "layer_types": ("layers_block_type",),
}
"""Other names of a field, in the order they are tried. A dot goes into a nested object."""

SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "kimi_k3": "kimi_linear",
    "mimo_v2": "mimo_v2_flash",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "minimax_m3": "minimax_m3_vl_text",
    "step3p5": "step3p7_text",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Model types of the hub that keep what another family keeps."""


@lru_cache(maxsize=1)
def class_defaults() -> dict[str, dict[str, Any]]:
    """What transformers' config classes assume when a config.json leaves a field out, by model_type."""
    return json.loads((files(__package__) / "defaults.json").read_text())  # type: ignore[no-any-return]


def load(source: object) -> dict[str, Any]:
    """The raw config of a path (file or model directory), a mapping, or a transformers config object."""
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    if not isinstance(source, str | Path):
        raise ConfigError(f"expected a path, a dict or a transformers config, got {type(source).__name__}")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a JSON {type(data).__name__}, not an object")
    return data


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model; what the inner part leaves out, the outer may say."""
    for name in NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping) and inner:
            outer = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
            named = {"model_type": f"{config.get('model_type', '')}_text"}
            return language_model({**outer, **named, **inner})
    return dict(config)


def family_of(config: Mapping[str, Any]) -> str:
    """The model type whose rules apply: as named, or told from the architecture (`LongcatFlashForCausalLM`)."""
    named = config.get("model_type")
    if not named:
        name = re.sub(r"For[A-Z].*$", "", (config.get("architectures") or [""])[0])
        named = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return SAME_AS.get(named, str(named))


class Fields:
    """Answers for one config, or for one layer of it. Remembers in `notes` what it had to assume."""

    def __init__(self, config: Mapping[str, Any], notes: list[str], defaults: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.notes = notes
        self.model_type = str(config.get("model_type", ""))
        self.family = family_of(config)
        self.defaults = class_defaults().get(self.family, {}) if defaults is None else defaults

    def layer(self, index: int) -> Fields:
        """The fields as layer `index` sees them: its `per_layer_config` entry, and its place in per-layer lists."""
        overrides = self.config.get("per_layer_config") or {}
        own = next((fields for key, fields in overrides.items() if int(key) == index), None)  # keys may be "05"
        lists = {name: value for name in _PER_LAYER if isinstance(value := self.config.get(name), list)}
        for name, value in lists.items():
            if index >= len(value):
                raise ConfigError(f"{self._who}: {name} has {len(value)} entries, none for layer {index}")
        lists = {name: value[index] for name, value in lists.items()}
        return Fields({**self.config, **lists, **(own or {})}, self.notes, self.defaults)

    def get(self, name: str, default: Any = None) -> Any:
        """The field or an alias of it, as the config says; else as its class assumes; else `default`."""
        value = self._find(self.config, name)
        if value is None and not self._is_null(name):
            value = self._find(self.defaults, name)
        return default if value is None else value

    def _find(self, source: Mapping[str, Any], name: str) -> Any:
        values = (_dig(source, candidate) for candidate in (name, *ALIASES.get(name, ())))
        return next((value for value in values if value is not None), None)

    def _is_null(self, name: str) -> bool:
        """Written as null: the model derives it from other fields, whatever the class assumes."""
        return any(candidate in self.config for candidate in (name, *ALIASES.get(name, ())))

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def count(self, name: str, default: int | None = None, *, least: int = 0, most: int | None = None) -> int:
        """A whole number; `least` is 1 for one that others are divided by."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            if value is None:
                raise ConfigError(f"{self._who}: {self._missing(name)}")
            raise ConfigError(f"{self._who}: {name} must be a whole number, got {value!r}")
        if value < least:
            raise ConfigError(f"{self._who}: {name} must be at least {least}, got {value}")
        if most is not None and value > most:
            raise ConfigError(f"{self._who}: {name} must be at most {most:,}, got {value}")
        if self._find(self.config, name) is None and default is None:
            self._note(f"{name} = {value} is the default of {self.family}; config.json leaves it out")
        return value

    def require(self, *names: str) -> None:
        """All that is missing, in one error."""
        if missing := [name for name in names if not self.has(name)]:
            raise ConfigError(f"{self._who}: {'; '.join(map(self._missing, missing))}")

    @property
    def num_layers(self) -> int:
        """As the config says; else as many as it names kinds for, or letters of a pattern."""
        named = self._find(self.config, "layer_types") or self._find(self.config, "hybrid_override_pattern")
        if named is not None and self._find(self.config, "num_hidden_layers") is None:
            return len(named)
        return self.count("num_hidden_layers", most=MOST_LAYERS)

    @property
    def _who(self) -> str:
        return f"config of model_type {self.model_type!r}" if self.model_type else "config without a model_type"

    @staticmethod
    def _missing(name: str) -> str:
        others = ALIASES.get(name, ())
        return f"{name} is missing" + (f" (or {', '.join(others)})" if others else "")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


_PER_LAYER = ("num_key_value_heads", "num_kv_heads", "sliding_window", "head_dim")
"""Fields that some configs give as a list, one entry a layer."""


def _dig(source: Mapping[str, Any], path: str) -> Any:
    value: Any = source
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def as_list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{what} must be a list, got {value!r}")
    return list(value)
