"""Random roles, caches and models for property tests: as wild as a spec may be, as small as an arena must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from kvweave.errors import NeverFits
from kvweave.plan import Layout, Parallel, Place, Plan, PoolRequest, make_plan
from kvweave.spec import (
    Chunk,
    DType,
    Full,
    Layer,
    LayerCache,
    ModelSpec,
    Part,
    Reach,
    Read,
    Role,
    Segment,
    SinkWindow,
    State,
    Window,
)

NAMES = ("key", "value", "key_scale", "latent", "indexer", "conv_state", "ssm_state", "a_name_of_my_own")

reaches: st.SearchStrategy[Reach] = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 70)),
    st.builds(Chunk, st.integers(1, 70)),
    st.builds(SinkWindow, st.integers(1, 40), st.integers(1, 70)),
    st.just(State()),
)


@st.composite
def shapes(draw: st.DrawFn, dtype: DType) -> tuple[int, ...]:
    """One to three axes; the last is whole bytes."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return (*shape[:-1], shape[-1] * (2 if dtype.bits < 8 else 1))


@st.composite
def splits(draw: st.DrawFn, shape: tuple[int, ...], dtype: DType) -> tuple[Segment, ...]:
    """Nothing, one run of heads, or two runs of different ones; never half a byte to a rank."""
    width = 2 if dtype.bits < 8 and len(shape) == 1 else 1
    units = shape[0] // width
    first = draw(st.integers(0, units))
    return draw(st.sampled_from(((), (Segment(units, width),), (Segment(first, width), Segment(units - first, width)))))


@st.composite
def plain_roles(draw: st.DrawFn, name: str, tokens_per_row: int) -> Role:
    dtype = draw(st.sampled_from(DType))
    shape = draw(shapes(dtype))
    return Role(
        name,
        shape,
        dtype,
        tokens_per_row,
        token_axis=draw(st.integers(0, len(shape))),
        align=draw(st.sampled_from((1, 1, 2, 16, 48))),
        split=draw(splits(shape, dtype)),
    )


@st.composite
def packed_roles(draw: st.DrawFn, name: str, tokens_per_row: int) -> Role:
    dtypes = draw(st.lists(st.sampled_from(DType), min_size=1, max_size=3))
    parts = [Part(f"part{i}", draw(shapes(dtype)), dtype) for i, dtype in enumerate(dtypes)]
    planar, align = draw(st.booleans()), draw(st.sampled_from((1, 1, 8, 36)))
    return Role.packed(name, parts, planar=planar, align=align, tokens_per_row=tokens_per_row)


@st.composite
def roles(draw: st.DrawFn, name: str = "key", tokens_per_row: int = 1) -> Role:
    return draw(st.one_of(plain_roles(name, tokens_per_row), packed_roles(name, tokens_per_row)))


@st.composite
def caches(draw: st.DrawFn, tag: str = "full", reach: st.SearchStrategy[Reach] = reaches) -> LayerCache:
    """Up to four roles, the last perhaps an alias of the first."""
    seen = draw(reach)
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    rates = st.sampled_from((1, 1, 1, 2, 4)) if seen.per_token else st.just(1)
    kept = [draw(roles(name, draw(rates))) for name in names]
    if draw(st.booleans()):
        kept.append(_alias(kept[0]))
    cache = LayerCache(
        tag, seen, tuple(kept), kernel_tokens=draw(st.sampled_from((1, 1, 2, 4))), context_split=draw(st.booleans())
    )
    wish = draw(st.one_of(st.none(), st.integers(1, 4)))
    return LayerCache(
        tag,
        seen,
        cache.roles,
        cache.kernel_tokens,
        None if wish is None else wish * cache.unit_tokens,
        cache.context_split,
    )


def _alias(role: Role) -> Role:
    return Role(
        "the_same",
        role.shape,
        role.dtype,
        role.tokens_per_row,
        role.token_axis,
        role.parts,
        role.planar,
        role.align,
        role.name,
        role.split,
    )


@st.composite
def models(draw: st.DrawFn, reads: bool = True, most_tags: int = 5, most_layers: int = 8) -> ModelSpec:
    """Layers that keep none, one or several of up to five caches; some read another's; the last may be drafts."""
    kept = [draw(caches(f"tag{i}")) for i in range(draw(st.integers(1, most_tags)))]
    members = draw(st.lists(st.lists(st.sampled_from(kept), unique=True), min_size=1, max_size=most_layers))
    members[0] = members[0] or kept[:1]
    num_drafts = draw(st.integers(0, len(members) - 1))
    layers = [
        Layer(tuple(own), draw(_reads(members, index)) if reads else (), draft=index >= len(members) - num_drafts)
        for index, own in enumerate(members)
    ]
    used = {cache.tag for own in members for cache in own}
    return ModelSpec(
        model_type=draw(st.sampled_from(("llama", "a model of my own"))),
        layers=tuple(layers),
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 10**6))),
        placeholders=tuple(cache for cache in kept if cache.tag not in used),
        notes=tuple(draw(st.lists(st.text(max_size=8), max_size=2))),
    )


@st.composite
def _reads(draw: st.DrawFn, members: Sequence[Sequence[LayerCache]], index: int) -> tuple[Read, ...]:
    """A cache of an earlier layer, of a tag that this one does not keep itself."""
    others = [(layer, cache) for layer, own in enumerate(members[:index]) for cache in own]
    sources = [(layer, cache) for layer, cache in others if cache not in members[index]]
    if not sources or draw(st.booleans()):
        return ()
    layer, cache = draw(st.sampled_from(sources))
    names = draw(st.lists(st.sampled_from([role.name for role in cache.roles]), unique=True))
    return (Read(layer, cache.tag, tuple(names)),)


@st.composite
def requests(draw: st.DrawFn, tags: Sequence[str]) -> dict[str, PoolRequest]:
    """Pools of their own for some groups: counted, weighted, or on the host."""
    own = draw(st.lists(st.sampled_from(tags), unique=True))
    wish = st.one_of(
        st.builds(PoolRequest, pages=st.integers(8, 20), place=st.sampled_from(Place)),
        st.builds(PoolRequest, weight=st.floats(0.01, 100)),
        st.just(PoolRequest()),
    )
    return {tag: draw(wish) for tag in own}


@st.composite
def wishes(draw: st.DrawFn, spec: ModelSpec, own_pools: bool = True) -> dict[str, Any]:
    """Keyword arguments of `plan`, memory apart."""
    kinds = ["auto", "shared", "independent"]
    return {
        "block_tokens": draw(st.sampled_from((4, 8, 16))),
        "pools": draw(st.sampled_from(kinds if len(spec.groups()) > 1 else [*kinds, "uniform"])),
        "layout": draw(st.sampled_from((None, *Layout))),
        "own_pools": draw(requests(list(spec.groups()))) if own_pools else None,
        "parallel": Parallel(tp=draw(st.sampled_from((1, 1, 2, 3))), cp=draw(st.sampled_from((1, 1, 2)))),
        "reserve": draw(st.sampled_from((0, 1, 4096))),
    }


def smallest_memory(spec: ModelSpec, **how: Any) -> int:
    try:
        make_plan(spec, 1, **how)
    except NeverFits as error:
        return error.smallest_bytes
    return 1


@st.composite
def plans(draw: st.DrawFn, /, most_bytes: int = 3_000_000, **limits: Any) -> Plan:
    """A random model in little more memory than it needs."""
    spec = draw(models(**limits))
    how = draw(wishes(spec))
    return make_plan(spec, smallest_memory(spec, **how) + draw(st.integers(0, most_bytes)), **how)
