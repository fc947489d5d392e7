"""Views, laid out in real memory: every byte of an arena is one row's or declared padding, and no byte is two rows'."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvweave import from_config, make_plan
from kvweave.errors import PlanError, UnknownName
from kvweave.plan import Group, Layout, Plan, Pool, PoolRequest, View
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Part, Read, Role, State, Window
from tests import strategies

ITEM_BYTES = {dtype: max(1, dtype.bits // 8) for dtype in DType}


def bytes_of(view: View, num_bytes: int) -> NDArray[np.int64]:
    """The index of every byte that a view's elements touch, shaped as the view; a byte met twice is there twice."""
    arena = np.arange(num_bytes, dtype=np.int64)
    shape = (*view.shape, ITEM_BYTES[view.dtype])
    strides = tuple(8 * stride for stride in (*view.strides, 1))
    last = view.offset + sum((size - 1) * stride for size, stride in zip(shape, (*view.strides, 1), strict=True))
    assert view.offset >= 0
    assert math.prod(shape) == 0 or last < num_bytes, f"{view.role} of layer {view.layer} leaves its pool"
    return as_strided(arena[view.offset :], shape, strides)


small_plans = strategies.plans(most_bytes=60_000).filter(
    lambda made: all(pool.num_bytes < 500_000 for pool in made.pools)
)


def touches(views: list[View], num_bytes: int) -> NDArray[np.int64]:
    """How often each byte of the pool is met."""
    return sum(
        (np.bincount(bytes_of(view, num_bytes).ravel(), minlength=num_bytes) for view in views),
        start=np.zeros(num_bytes, np.int64),
    )


def own_views(made: Plan, group: Group) -> list[View]:
    return [
        made.view(layer, role.name, group.tag)
        for layer in group.layers
        for role in group.cache.roles
        if role.alias_of is None
    ]


def present(made: Plan) -> Iterator[tuple[Group, Pool]]:
    for group in made.groups:
        if group.layers:
            yield group, made.pool(group.pool)


def all_pages(group: Group, pool: Pool) -> int:
    """Pages of the whole arena, those of the NULL super-page too."""
    return pool.num_superpages * group.pages_per_superpage


def page_of(group: Group, pool: Pool, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lane and the page in whose share of the arena a byte lies."""
    lane, within = np.divmod(index, pool.num_superpages * pool.superpage_bytes)
    return lane, within // group.page_stride


# ---- every byte


@given(small_plans)
def test_views_of_a_group_never_overlap_and_cover_the_arena_but_for_padding(made: Plan) -> None:
    for group, pool in present(made):
        count = touches(own_views(made, group), pool.num_bytes)
        assert count.max(initial=0) <= 1
        pages = all_pages(group, pool)
        assert count.sum() == pages * group.payload_bytes
        assert (count == 0).sum() == pages * made.padding_bytes(group.tag)
        assert pages * made.stride_bytes(group.tag) == pool.num_bytes
        assert made.num_pages(group.tag) == pages - group.pages_per_superpage, "super-page 0 is nobody's"


@given(small_plans)
def test_a_page_keeps_to_its_own_share_and_a_super_page_to_its_own(made: Plan) -> None:
    """So that groups may take and give back whole super-pages, in every lane, without touching one another."""
    for group, pool in present(made):
        lanes_seen: Counter[int] = Counter()
        for view in own_views(made, group):
            index = bytes_of(view, pool.num_bytes)
            lanes, pages = page_of(group, pool, index)
            blocks = np.arange(view.shape[0]).reshape(-1, *[1] * (index.ndim - 1)) if index.size else 0
            if group.cache.reach.per_token:
                assert view.shape[0] == all_pages(group, pool) * group.kernel_blocks
            assert (pages == blocks // group.kernel_blocks).all()
            supers = index % (pool.num_superpages * pool.superpage_bytes) // pool.superpage_bytes
            assert (supers == pages // group.pages_per_superpage).all()
            assert len(np.unique(lanes)) <= 1, "a layer lies in one lane"
            if view.role == group.cache.roles[0].name:
                lanes_seen.update(map(int, np.unique(lanes)))
        assert max(lanes_seen.values(), default=0) <= group.lane_layers


@given(small_plans)
def test_the_padding_that_a_plan_declares_is_all_there_is(made: Plan) -> None:
    for pool in made.pools:
        assert sum(1 for group, _ in present(made) if group.pool == pool.name) == len(pool.tags) > 0
    for group, _ in present(made):
        tag = group.tag
        assert 0 <= made.padding_bytes(tag) == made.stride_bytes(tag) - group.payload_bytes
        assert group.payload_bytes <= group.page_bytes <= made.stride_bytes(tag)
    assert 0 <= made.padding_share(100) < 1


@given(small_plans)
def test_elements_lie_where_their_type_may_lie(made: Plan) -> None:
    for group, _ in present(made):
        for role in group.cache.roles:
            for layer in group.layers:
                view = made.view(layer, role.name, group.tag)
                item = ITEM_BYTES[view.dtype]
                assert view.offset % item == 0
                assert all(stride % item == 0 for stride in view.strides)
                assert view.offset % role.align == 0
                assert view.strides[0] % role.align == 0
                assert view.strides[0] % 16 == 0


@given(small_plans)
def test_an_alias_is_the_role_it_names(made: Plan) -> None:
    for group, _ in present(made):
        for role in group.cache.roles:
            if role.alias_of is not None:
                for layer in group.layers:
                    mine, its = (made.view(layer, name, group.tag) for name in (role.name, role.alias_of))
                    assert (mine.offset, mine.shape, mine.strides) == (its.offset, its.shape, its.strides)


@given(small_plans)
def test_parts_share_a_packed_role_among_them_without_gaps_or_overlap(made: Plan) -> None:
    for group, pool in present(made):
        for view in own_views(made, group):
            if view.parts:
                whole = touches([view], pool.num_bytes)
                assert (touches(list(view.parts), pool.num_bytes) == whole).all()


@given(small_plans)
def test_views_come_by_layer_then_by_group_and_role(made: Plan) -> None:
    order = {group.tag: number for number, group in enumerate(made.groups)}
    names = {group.tag: [role.name for role in group.cache.roles] for group in made.groups}
    keys = [(view.layer, order[view.tag], names[view.tag].index(view.role)) for view in made.views()]
    assert keys == sorted(keys)
    assert len(keys) == len(set(keys)) == sum(len(group.layers) * len(group.cache.roles) for group in made.groups)


# ---- where exactly


def one_layer(cache: LayerCache, pages: int = 3, **how: Any) -> Plan:
    """A pool of so many pages, of which page 0 is the NULL page."""
    made = make_plan(
        ModelSpec("one", (Layer((cache,)),)), 1 << 20, own_pools={cache.tag: PoolRequest(pages=pages - 1)}, **how
    )
    assert made.num_pages(cache.tag) == pages - 1
    return made


INDEXER = Role.packed(
    "indexer", [Part("values", (128,), DType.FLOAT8_E4M3), Part("scale", (1,), DType.FLOAT32)], planar=True
)


def test_a_planar_page_is_all_values_then_all_scales() -> None:
    made = one_layer(LayerCache("indexer", Full(), (INDEXER,), kernel_tokens=64), block_tokens=128)
    view = made.view(0, "indexer")
    assert (view.dtype, view.shape, view.strides) == (DType.UINT8, (6, 64 * 132), (64 * 132, 1))
    values, scale = view.parts
    assert (values.role, values.dtype, values.offset) == ("indexer.values", DType.FLOAT8_E4M3, 0)
    assert (values.shape, values.strides) == ((6, 64, 128), (64 * 132, 128, 1))
    assert (scale.dtype, scale.offset) == (DType.FLOAT32, 64 * 128)
    assert (scale.shape, scale.strides) == ((6, 64, 1), (64 * 132, 4, 4))


def test_a_packed_row_is_its_parts_one_after_the_other() -> None:
    parts = [
        Part("nope", (512,), DType.FLOAT8_E4M3),
        Part("scale", (4,), DType.FLOAT32),
        Part("rope", (64,), DType.BFLOAT16),
    ]
    made = one_layer(LayerCache("latent", Full(), (Role.packed("latent", parts),)))
    view = made.view(0, "latent")
    assert (view.shape, view.strides) == ((3, 16, 656), (16 * 656, 656, 1))
    assert [part.offset for part in view.parts] == [0, 512, 528]
    assert [part.strides for part in view.parts] == [(10496, 656, 1), (10496, 656, 4), (10496, 656, 2)]


def test_bytes_written_through_parts_are_read_where_the_docstring_draws_them() -> None:
    """a0 a1 a2 a3 b0 b1 b2 b3, and a0 b0 a1 b1 a2 b2 a3 b3."""
    drawn = {}
    for planar in (True, False):
        parts = [Part("a", (2,), DType.UINT8), Part("b", (1,), DType.UINT8)]
        made = one_layer(
            LayerCache("x", Full(), (Role.packed("x", parts, planar=planar, align=16),)), pages=2, block_tokens=4
        )
        arena = np.zeros(made.num_bytes, np.uint8)
        for name, part in zip("ab", made.view(0, "x").parts, strict=True):
            rows = as_strided(arena[part.offset :], part.shape, part.strides)
            rows[1] = (ord(name) + 16 * np.arange(4) - 97).reshape(4, 1)
        drawn[planar] = [f"{'ab'[value % 16]}{value // 16}" for value in arena[16:28]]
    assert drawn[True] == ["a0", "a0", "a1", "a1", "a2", "a2", "a3", "a3", "b0", "b1", "b2", "b3"]
    assert drawn[False] == ["a0", "a0", "b0", "a1", "a1", "b1", "a2", "a2", "b2", "a3", "a3", "b3"]


def test_keys_and_values_are_heads_by_tokens_by_width_and_lie_side_by_side() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
    made = make_plan(from_config({**config, "dtype": "bfloat16"}), "1MB", block_tokens=32, kernel_tokens=16)
    blocks, role_bytes = (made.num_pages("full") + 1) * 2, 4 * 16 * 32 * 2
    key, value = made.view(1, "key"), made.view(1, "value")
    assert key.shape == (blocks, 4, 16, 32)
    assert key.strides == (2 * role_bytes, 16 * 32 * 2, 32 * 2, 2)
    assert value.offset - key.offset == role_bytes
    assert key.offset == made.pool("full").num_superpages * made.pool("full").superpage_bytes


def test_a_state_is_one_row_a_page() -> None:
    cache = LayerCache("state", State(), (Role("ssm_state", (4, 8, 8), DType.FLOAT32),))
    view = one_layer(cache, pages=5).view(0, "ssm_state")
    assert (view.shape, view.strides) == ((5, 4, 8, 8), (1024, 256, 32, 4))


def test_elements_below_a_byte_are_shown_as_bytes() -> None:
    view = one_layer(LayerCache("full", Full(), (Role("key", (2, 64), DType.INT4, token_axis=1),))).view(0, "key")
    assert (view.dtype, view.shape) == (DType.UINT8, (3, 2, 16, 32))


def test_rows_of_several_tokens_are_fewer_rows() -> None:
    cache = LayerCache("csa", Full(), (Role("compressed", (512,), DType.BFLOAT16, tokens_per_row=4),))
    assert one_layer(cache, block_tokens=64).view(0, "compressed").shape == (3, 16, 512)


HYBRID = ModelSpec(
    "hybrid",
    (
        *[Layer((LayerCache("state", State(), (Role("ssm_state", (3, 1000), DType.FLOAT32),)),))] * 6,
        *[Layer((LayerCache("full", Full(), (Role("key", (2, 64), DType.BFLOAT16),)),))] * 4,
    ),
)


def test_a_page_major_page_is_one_run_of_bytes() -> None:
    made = make_plan(HYBRID, "4MB", layout="page_major")
    for group, pool in present(made):
        assert pool.lanes == 1
        index = np.concatenate([bytes_of(view, pool.num_bytes)[0].ravel() for view in own_views(made, group)])
        assert index.max() < group.page_stride


def test_layer_major_lanes_divide_the_layers_of_every_group() -> None:
    made = make_plan(HYBRID, "4MB", layout=Layout.LAYER_MAJOR)
    (pool,) = made.pools
    assert pool.lanes == 2
    assert {group.tag: group.lane_layers for group, _ in present(made)} == {"state": 3, "full": 2}


def test_a_layer_alone_in_its_lane_is_contiguous_memory() -> None:
    made = make_plan(HYBRID, "4MB", pools="independent", layout="layer_major")
    for group, pool in present(made):
        assert pool.lanes == len(group.layers)
        index = bytes_of(made.view(group.layers[1], group.cache.roles[0].name), pool.num_bytes)
        if group.page_bytes == group.payload_bytes:
            assert (np.diff(index.ravel()) == 1).all()


@pytest.mark.parametrize("layout", Layout)
def test_real_models_in_real_memory(layout: Layout) -> None:
    """DeepSeek V4 in fp8: seven groups, planar pages that end on 576 bytes, an alias, compressed rows."""
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": [0, 0, 4, 128, 4, 128],
        "dtype": "bfloat16",
    }
    spec = from_config(config, dtype="fp8")
    how: dict[str, Any] = {"layout": layout, "block_tokens": 256, "pools": "independent"}
    made = make_plan(spec, strategies.smallest_memory(spec, **how), **how)
    for group, pool in present(made):
        count = touches(own_views(made, group), pool.num_bytes)
        assert count.max() == 1
        assert (count == 0).sum() == all_pages(group, pool) * made.padding_bytes(group.tag)
        if group.tag in ("window", "csa", "hca"):
            assert group.kernel_stride % 576 == 0
            assert all(view.offset % 576 == 0 for view in own_views(made, group))


# ---- reads and look-ups


KEY, VALUE = Role("key", (2, 8), DType.BFLOAT16), Role("value", (2, 8), DType.BFLOAT16)
ROWS = LayerCache("full", Full(), (KEY, VALUE))
NEAR = LayerCache("near", Window(4), (KEY, VALUE))


def test_a_layer_that_reads_another_sees_its_memory() -> None:
    made = make_plan(ModelSpec("reads", (Layer((ROWS,)), Layer((ROWS,)), Layer(reads=(Read(1, "full"),)))), "1MB")
    assert made.view(2, "key") == made.view(1, "key") != made.view(0, "key")
    assert [view.layer for view in made.views()] == [0, 0, 1, 1]


def test_a_layer_may_read_one_role_here_and_another_there() -> None:
    reads = (Read(0, "full", ("key",)), Read(1, "full", ("value",)))
    made = make_plan(ModelSpec("reads", (Layer((ROWS,)), Layer((ROWS,)), Layer(reads=reads))), "1MB")
    assert made.view(2, "key") == made.view(0, "key")
    assert made.view(2, "value") == made.view(1, "value")


def test_a_layer_with_several_caches_needs_a_tag() -> None:
    made = make_plan(ModelSpec("two", (Layer((ROWS, NEAR)), Layer())), "1MB")
    assert made.view(0, "key", "near").tag == "near"
    with pytest.raises(PlanError, match="layer 0 has the caches full, near: say which tag"):
        made.view(0, "key")
    with pytest.raises(PlanError, match=r"layer 1 has the caches \(none\)"):
        made.view(1, "key")
    with pytest.raises(UnknownName, match=r"tag of layer 0 'nearr'; did you mean 'near'\?"):
        made.view(0, "key", "nearr")
    with pytest.raises(UnknownName, match=r"'keys'; did you mean 'key'\?"):
        made.view(0, "keys", "full")


@given(st.data())
def test_a_reader_of_a_random_model_sees_what_it_reads(data: st.DataObject) -> None:
    made = data.draw(small_plans)
    for reader, read in made.reads:
        group = made.group(read.tag)
        for name in read.roles or [role.name for role in group.cache.roles]:
            assert made.view(reader, name, read.tag) == made.view(read.layer, name, read.tag)
