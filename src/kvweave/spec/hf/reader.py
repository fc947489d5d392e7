"""The reader: kinds by `patterns`, caches by `kinds`, then sharing, tags and drafts."""

from __future__ import annotations

from dataclasses import replace

from kvweave.errors import ConfigError, KVWeaveError
from kvweave.spec.dtypes import DType
from kvweave.spec.hf.encoders import refuse_encoders
from kvweave.spec.hf.fields import MOST_LAYERS, Fields, class_defaults, family_of, language_model, load
from kvweave.spec.hf.kinds import FAMILIES, build_layer
from kvweave.spec.hf.patterns import CONV, FULL, LEGACY, LINEAR, NOTHING, PATTERNS, SLIDING, layer_kinds
from kvweave.spec.layer_caches import CacheBuilder, Caches, Store
from kvweave.spec.layer_spec import Layer, LayerCache, Read
from kvweave.spec.model import ModelSpec


def from_config(
    source: object, *, dtype: str = "auto", store: Store = "engine", draft_layers: bool = False
) -> ModelSpec:
    """What the layers of a model keep, read from its config.

    `source` is a config.json or a directory with one, a dict, or a transformers config object. `dtype` is what keys
    and values are kept in: "auto" (the model's), a float type, or a quantised one such as "fp8". `store` chooses the
    conventions: those of serving engines, or of transformers' own caches. `draft_layers` adds the MTP layers that
    come with the checkpoint. What was assumed is in the spec's `notes`.
    """
    whole = load(source)
    config = language_model(whole)
    try:
        if store == "engine":  # a model of transformers is there already, perhaps as a decoder alone
            refuse_encoders(whole, family_of(config))
        return _read(Fields(config, notes=[]), dtype, store, draft_layers)
    except KVWeaveError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        named = config.get("model_type")
        raise ConfigError(
            f"config of model_type {named!r}: a field has no meaning for its layers: {error!r}"
        ) from error


def _read(fields: Fields, dtype: str, store: Store, draft_layers: bool) -> ModelSpec:
    notes = fields.notes
    if fields.family in UNDESCRIBED:
        raise ConfigError(
            f"layers of model_type {fields.model_type!r} keep {UNDESCRIBED[fields.family]}: not known here"
        )
    if not any(fields.family in known for known in (class_defaults(), PATTERNS, FAMILIES)):
        fields.require(*_needed(fields))
        notes.append(f"model_type {fields.model_type!r} is not known here: planned by the general rule")
    build = CacheBuilder.parse(dtype, _model_dtype(fields), store)
    kinds, num_layers = _kinds(fields, draft_layers)
    caches = [build_layer(kind, fields.layer(i), build, i) for i, kind in enumerate(kinds)]
    layers = [Layer(own, draft=i >= num_layers) for i, own in enumerate(_with_tags(caches))]
    layers = _shared(fields, kinds, layers)
    max_tokens = fields.get("max_position_embeddings")
    return ModelSpec(
        model_type=fields.model_type or fields.family,
        layers=tuple(layers),
        max_tokens=max_tokens if isinstance(max_tokens, int) else None,
        notes=tuple(notes),
    )


UNDESCRIBED = {
    "reformer": "hidden states and hash buckets",
    "rwkv": "five states of their own kind",
    "xlnet": "hidden states of earlier segments",
    "xlstm": "an xLSTM's state",
}
"""Families whose fields look like attention's, but whose layers keep something else."""


_ROWLESS = {LINEAR, CONV, NOTHING}
"""Kinds of layers that keep no rows of tokens."""


def _needed(fields: Fields) -> list[str]:
    """The fields without which the general rule has no rows."""
    names = ["num_hidden_layers"] if fields.get("layer_types") is None else []
    kinds = {LEGACY.get(kind, kind) for kind in fields.get("layer_types") or [FULL]}
    if kinds <= _ROWLESS:
        return names
    if fields.has("kv_lora_rank"):
        return [*names, "qk_rope_head_dim"]
    names += [] if fields.has("num_key_value_heads") and fields.has("head_dim") else ["num_attention_heads"]
    return names if fields.has("head_dim") else [*names, "hidden_size"]


def _model_dtype(fields: Fields) -> DType:
    named = fields.config.get("dtype") or fields.config.get("torch_dtype")
    if named is None:
        fields.notes.append("config.json names no dtype: bfloat16 is assumed")
        return DType.BFLOAT16
    return DType.parse(named)


_LISTED = ("nemotron_h", "longcat_flash")
"""Families whose `num_hidden_layers` is not the number of layers with a cache; their pattern is."""


_DRAFTS = {"deepseek_v4": SLIDING}
"""The kind of draft layers, where it is not that of the last layer with rows."""


def _kinds(fields: Fields, draft_layers: bool) -> tuple[list[str], int]:
    """The kinds of all layers, the model's first, and how many are the model's.

    A list may go on with the kinds of draft layers; where it does not, they are as the last layer with rows.
    """
    kinds = layer_kinds(fields)
    num_layers = len(kinds) if fields.family in _LISTED else fields.num_layers
    if len(kinds) < num_layers:
        raise ConfigError(f"{fields.model_type}: {len(kinds)} layer types for {num_layers} layers")
    num_drafts = fields.count("num_draft_layers", 0, most=MOST_LAYERS) if draft_layers else 0
    tail = kinds[num_layers : num_layers + num_drafts]
    last = next((kind for kind in reversed(kinds[:num_layers]) if kind not in _ROWLESS), FULL)
    drafts = [_DRAFTS.get(fields.family, last)] * (num_drafts - len(tail))
    return [*kinds[:num_layers], *tail, *drafts], num_layers


def _with_tags(layers: list[Caches]) -> list[Caches]:
    """Equal caches share a tag; the second layout that claims a tag gets a number: full, full.2, ..."""
    taken: dict[str, list[LayerCache]] = {}

    def tagged(cache: LayerCache) -> LayerCache:
        seen = taken.setdefault(cache.tag, [])
        if cache not in seen:
            seen.append(cache)
        number = seen.index(cache) + 1
        return cache if number == 1 else replace(cache, tag=f"{cache.tag}.{number}")

    return [tuple(map(tagged, caches)) for caches in layers]


def _shared(fields: Fields, kinds: list[str], layers: list[Layer]) -> list[Layer]:
    """Layers that read another's cache lose their own of the same roles, also where it would be of another width."""
    sources = _sources(fields, kinds)
    for index, source in sources.items():
        read = [cache for cache in layers[source].caches if cache.tag != "indexer"]
        roles = {role.name for cache in read for role in cache.roles}
        kept = tuple(cache for cache in layers[index].caches if roles.isdisjoint(role.name for role in cache.roles))
        layers[index] = replace(layers[index], caches=kept, reads=tuple(Read(source, cache.tag) for cache in read))
    return layers


def _sources(fields: Fields, kinds: list[str]) -> dict[int, int]:
    """Which layers read which: by position, as Gemma-3n, Hunyuan and Mistral Large 4 have it."""
    num_layers = fields.num_layers
    if num_shared := fields.get("num_kv_shared_layers"):
        own = num_layers - num_shared
        last = {kind: index for index, kind in enumerate(kinds[:own])}
        return {index: last[kinds[index]] for index in range(own, num_layers)}
    if fields.get("use_cla"):
        factor = fields.count("cla_share_factor", least=1)
        return {index: index - index % factor for index in range(num_layers) if index % factor}
    if given := fields.get("kv_source_layers"):
        return {index: source for index, source in enumerate(given) if source is not None and source != index}
    return {}
