"""Cache layers by kind: for each layer class of transformers, our layer over the pages of an arena."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

from kvweave.errors import CannotServe
from kvweave.integrations.transformers.layers.attention_layers import AttentionLayer, IndexedLayer
from kvweave.integrations.transformers.layers.compressed_layer import CompressedLayer, Compressor
from kvweave.integrations.transformers.layers.state_layers import HybridLayer, LayerState, LinearLayer
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.paged_forward import LayerAttention
from kvweave.integrations.transformers.paged_memory import MakeLayer
from kvweave.integrations.transformers.paged_rows import PagedRows, keys_and_values, rows_of
from kvweave.integrations.transformers.support import Entry, Served
from kvweave.tensor import Arena, RoleView

Build = Callable[[Arena, Entry, LayerAttention | None], MakeLayer]

IN_PLACE = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Layers whose attention may read pages in place. Others select some of the tokens, which no kernel of ours does."""


def layer_attentions(arena: Arena, entries: SequenceOf[Entry]) -> dict[int, LayerAttention]:
    """Attention over the keys and values of each entry that has them; none if some layer cannot read them in place.

    Models that select tokens ask for the name of their attention implementation, which must then stay as it is.
    """
    found = {}
    for number, entry in enumerate(entries):
        for cache in (cache for cache in entry.caches if cache.reach.per_token):
            is_kv = [role.name for role in cache.roles] in (["key", "value"], ["latent", "rope"])
            if not is_kv or type(entry.reference).__name__ not in IN_PLACE:
                return {}
            found[number] = LayerAttention(arena.layer(entry.layer, cache.tag), cache.reach)
    return found


def make_layer(model: str, arena: Arena, entry: Entry, attention: LayerAttention | None) -> MakeLayer:
    """A function that makes the layer of an entry for each new cache; the views of its memory are made once."""
    kind = type(entry.reference).__name__
    if kind not in KINDS:
        raise CannotServe(model, f"layer {entry.layer} keeps its past in a {kind}, which is not known here")
    rowless = kind in ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer")
    if rowless and any(not cache.reach.per_token for cache in entry.caches):
        raise CannotServe(model, f"layer {entry.layer} keeps a state on the module, where no cache can reach it")
    return KINDS[kind](arena, entry, attention)


def attention_of(arena: Arena, entry: Entry) -> dict[str, Any]:
    """The arguments of a layer for its keys and values; none if the layer reads another layer's."""
    for cache in entry.caches:
        if cache.reach.per_token and len(cache.roles) == 2:
            return {"tag": cache.tag, "kept": keys_and_values(arena.layer(entry.layer, cache.tag))}
    return {}


def only_rows(arena: Arena, layer: int, tag: str) -> tuple[str, PagedRows]:
    """A cache of one role."""
    (view,) = arena.layer(layer, tag).roles.values()
    return tag, rows_of(view)


def state_views(arena: Arena, entry: Entry) -> list[tuple[str, RoleView]]:
    tags = [cache.tag for cache in entry.caches if not cache.reach.per_token]
    return [(tag, view) for tag in tags for view in arena.layer(entry.layer, tag).roles.values()]


def states(views: list[tuple[str, RoleView]]) -> list[LayerState]:
    return [LayerState(tag, view.role.name, view.tensor) for tag, view in views]


def attention(arena: Arena, entry: Entry, in_place: LayerAttention | None) -> MakeLayer:
    if not entry.caches:
        return lambda _: entry.reference
    window = getattr(entry.reference, "sliding_window", None)
    arguments = {**attention_of(arena, entry), "attention": in_place}
    return lambda past: AttentionLayer(past, window=window, **arguments)


def indexed(arena: Arena, entry: Entry, _: LayerAttention | None) -> MakeLayer:
    arguments = attention_of(arena, entry)
    for cache in entry.caches:
        if cache.reach.per_token and len(cache.roles) == 1:
            arguments[cache.roles[0].name] = only_rows(arena, entry.layer, cache.tag)
    return lambda past: IndexedLayer(past, **arguments)


def linear(arena: Arena, entry: Entry, _: LayerAttention | None) -> MakeLayer:
    views = state_views(arena, entry)
    return lambda past: LinearLayer(past, states(views))


def hybrid(arena: Arena, entry: Entry, in_place: LayerAttention | None) -> MakeLayer:
    views, arguments = state_views(arena, entry), {**attention_of(arena, entry), "attention": in_place}
    window = getattr(entry.reference, "sliding_window", None)
    return lambda past: HybridLayer(past, states(views), window=window, **arguments)


def compressed(arena: Arena, entry: Entry, _: LayerAttention | None) -> MakeLayer:
    """A window, and compressors: rows of several tokens, each beside `<tag>_state` and perhaps `<tag>_overlap`."""
    arguments, window = attention_of(arena, entry), entry.reference.sliding_window
    rate = entry.reference.compress_rate
    names = {"indexer": "indexer"}
    tags = {names.get(c.tag, "compressor"): c.tag for c in entry.caches if c.roles[0].tokens_per_row > 1}
    rows = partial(only_rows, arena, entry.layer)
    kept = {name: (rows(tag), rows(f"{tag}_state"), f"{tag}_overlap") for name, tag in tags.items()}

    def make(past: PagedCache) -> CompressedLayer:
        overlaps = {state.tag: state for state in states(state_views(arena, entry))}
        compressors = {n: Compressor(own, waiting, overlaps.get(tag)) for n, (own, waiting, tag) in kept.items()}
        return CompressedLayer(past, rate, compressors, window=window, **arguments)

    return make


def counts_padding(served: Served) -> bool:
    """Whether padding is stored with the tokens, because the model's positions count it."""
    return not served.takes_positions and any(cache.reach.per_token for _, cache in served.spec.caches())


def takes_no_padding(served: Served) -> bool:
    """Whether the model processes several tokens at a time, padding among them, so that padded batches are refused."""
    by_row = any(role.tokens_per_row > 1 for _, cache in served.spec.caches() for role in cache.roles)
    return by_row or any(type(entry.reference).__name__ in CHOOSES_BLOCKS for entry in served.entries)


CHOOSES_BLOCKS = ("MiniMaxM3VLSparseCacheLayer",)
"""Layers whose attention selects whole blocks of columns."""

KINDS: dict[str, Build] = {
    "DynamicLayer": attention,
    "DynamicSlidingWindowLayer": attention,
    "DynamicIndexedLayer": indexed,
    "MiniMaxM3VLSparseCacheLayer": indexed,
    "DeepseekV4CSACache": compressed,
    "DeepseekV4HCACache": compressed,
    "LinearAttentionLayer": linear,
    "LinearAttentionAndFullAttentionLayer": hybrid,
    "LinearAttentionAndSlidingWindowAttentionLayer": hybrid,
}
