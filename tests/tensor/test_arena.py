"""Arenas: one allocation a pool, given back once, and views that lie where the plan says."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import make_plan
from kvweave.errors import ArenaClosed, KVWeaveError, NoDevice, OutOfMemory, PlanError, UnknownName
from kvweave.plan import Layout, Parallel, Place, Plan, PoolRequest
from kvweave.spec import Layer, LayerCache, ModelSpec, Read, Role
from kvweave.tensor import Arena, Memory, tensor_name
from tests import strategies
from tests.tensor.models import DSA, FULL, HYBRID, KEY, NEAR, STATE, lives

PLANS = lives()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a contiguous tensor, and the one behind its last."""
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


# ---- memory


@pytest.mark.parametrize("name", PLANS)
def test_a_pool_is_one_allocation_of_exactly_its_bytes(name: str) -> None:
    with Arena(PLANS[name]) as arena:
        assert arena.memory.num_live == len(PLANS[name].pools)
        assert arena.memory.live_bytes == arena.stats().num_bytes == sum(pool.num_bytes for pool in PLANS[name].pools)
        storages = {tensor.untyped_storage().data_ptr() for tensor in arena.tensors().values()}
        assert storages == {arena.pool(pool.name).data_ptr() for pool in PLANS[name].pools}


def test_closing_twice_is_closing_once_and_nothing_stays() -> None:
    memory = Memory()
    with Arena(PLANS["v4"], memory) as arena:
        stays = weakref.ref(arena.pool("csa"))
        arena.close()
        arena.close()
        assert (memory.num_live, memory.live_bytes, arena.stats().pools) == (0, 0, ())
    gc.collect()
    assert stays() is None
    for use in (lambda: arena.layer(0), lambda: arena.pool("csa"), lambda: arena.pages("csa"), arena.tensors):
        with pytest.raises(ArenaClosed, match="closed"):
            use()


def test_running_out_of_memory_leaves_nothing_allocated() -> None:
    absurd = {"full": PoolRequest(pages=2), "window": PoolRequest(pages=1 << 28, place=Place.HOST)}
    made = make_plan(HYBRID, "1MB", own_pools=absurd)
    memory = Memory()
    with pytest.raises(
        OutOfMemory, match=r"pool 'window': cannot allocate \d+ bytes .*host memory.*ask for less memory"
    ) as caught:
        Arena(made, memory)
    assert isinstance(caught.value, KVWeaveError)
    assert caught.value.wanted_bytes == sum(pool.num_bytes for pool in made.pools), "none of it is touched yet"
    assert (memory.num_live, memory.live_bytes) == (0, 0)


def test_sizes_beyond_any_address_are_out_of_memory_too() -> None:
    with pytest.raises(OutOfMemory):
        Memory().take(1 << 70, Place.DEVICE, "pool")


def test_a_failure_that_is_no_shortage_is_not_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the driver is on fire")

    memory = Memory()
    monkeypatch.setattr("kvweave.tensor.memory.mmap.mmap", broken)
    with pytest.raises(RuntimeError, match="on fire"):
        Arena(PLANS["dsa fp8"], memory)
    assert memory.num_live == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_without_cuda_pinned_memory_is_ordinary_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pools = {tag: PoolRequest(pages=3, place=Place.PINNED) for tag in ("full", "window")}
    pools["state"] = PoolRequest(pages=3, place=Place.HOST)
    made = make_plan(HYBRID, "1MB", own_pools=pools)
    with caplog.at_level(logging.WARNING), Arena(made) as arena:
        assert {(p.name, p.asked, p.given) for p in arena.stats().pools} == {
            ("full", Place.PINNED, Place.HOST),
            ("window", Place.PINNED, Place.HOST),
            ("state", Place.HOST, Place.HOST),
        }
    assert [record.getMessage() for record in caplog.records] == [
        "pool 'full': no CUDA here, so pinned memory is ordinary host memory"
    ]


def test_a_device_that_is_not_here_is_named() -> None:
    with pytest.raises(NoDevice, match=r"'cuda:99' is not available: torch sees \d+ CUDA devices"):
        Arena(PLANS["dsa fp8"], "cuda:99")
    with pytest.raises(NoDevice, match="unknown device 'gpu'"):
        Arena(PLANS["dsa fp8"], "gpu")


@pytest.mark.parametrize("name", PLANS)
def test_the_null_page_of_every_group_is_zeros(name: str) -> None:
    """Also where memory was used before: fill it, give it back, take it again."""
    made = PLANS[name]
    with Arena(made) as arena:
        for pool in made.pools:
            arena.pool(pool.name).fill_(255)
    with Arena(made) as arena:
        for group in made.groups:
            assert not arena.pages(group.tag)[: group.pages_per_superpage].any()


def test_memory_is_zeros_everywhere_and_is_taken_when_it_is_touched() -> None:
    pools = {"full": PoolRequest(pages=3, place=Place.HOST), "window": PoolRequest(pages=3, place=Place.PINNED)}
    with Arena(make_plan(HYBRID, "64MB", own_pools=pools), Memory("cpu")) as arena:
        assert not any(arena.pool(pool.name).any() for pool in arena.plan.pools)
    before = resident_bytes()
    with Arena(make_plan(HYBRID, "256MB")) as arena:
        assert arena.stats().num_bytes > 200 << 20
        assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- where views lie


@settings(max_examples=40)
@given(strategies.plans(most_bytes=60_000))
def test_views_are_the_plans_views_over_the_pools_bytes(made: Plan) -> None:
    with Arena(made) as arena:
        for view in made.views():
            tensor = arena.layer(view.layer, view.tag)[view.role]
            assert tensor.data_ptr() - arena.pool(view.pool).data_ptr() == view.offset or not tensor.numel()
            assert tuple(tensor.shape) == view.shape
            assert tuple(s * tensor.element_size() for s in tensor.stride()) == view.strides
            parts = arena.layer(view.layer, view.tag).role(view.role).parts
            for part, shown in zip(parts.values(), view.parts, strict=True):
                assert part.data_ptr() - arena.pool(view.pool).data_ptr() == shown.offset
                assert tuple(part.shape[: len(shown.shape)]) == shown.shape
                assert tuple(s * part.element_size() for s in part.stride()[: len(shown.shape)]) == shown.strides


@pytest.mark.parametrize("name", PLANS)
def test_blocks_of_different_roles_and_layers_never_overlap(name: str) -> None:
    """By address: block 1 of every role of a group, the parts of a page as they are."""
    made = PLANS[name]
    with Arena(made) as arena:
        for group in made.groups:
            spans = [
                span(view.tensor[block])
                for layer in group.layers
                for view in arena.layer(layer, group.tag).roles.values()
                if view.role.alias_of is None
                for block in (1, 2)
            ]
            assert len(spans) > 0
            assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_an_alias_is_the_same_memory() -> None:
    with Arena(PLANS["v4"]) as arena:
        layer = arena.layer(0)
        assert layer["value"].data_ptr() == layer["key"].data_ptr()
        assert layer.kv is None


@pytest.mark.parametrize("name", PLANS)
def test_addresses_stay(name: str) -> None:
    with Arena(PLANS[name]) as arena:
        before = {key: tensor.data_ptr() for key, tensor in arena.tensors().items()}
        assert {key: tensor.data_ptr() for key, tensor in arena.tensors().items()} == before
        group = next(group for group in PLANS[name].groups if group.layers)
        assert arena.layer(group.layers[0], group.tag) is arena.layer(group.layers[0], group.tag)


@pytest.mark.parametrize("layout", Layout)
def test_a_page_is_all_bytes_of_its_layers_and_no_others(layout: Layout) -> None:
    made = make_plan(HYBRID, "2MB", layout=layout, block_tokens=8, kernel_tokens=4)
    with Arena(made) as arena:
        for group in made.groups:
            arena.pool(group.pool).zero_()
            page = group.pages_per_superpage
            for layer in group.layers:
                for view in arena.layer(layer, group.tag).roles.values():
                    view.tensor.view(torch.uint8)[page * group.kernel_blocks : (page + 1) * group.kernel_blocks] = 7
            pages = arena.pages(group.tag)
            assert (pages == 7).sum() == (pages[page] == 7).sum() == group.payload_bytes
            assert pages[page].is_contiguous() == (layout is Layout.PAGE_MAJOR) or pages.shape[1] == 1


# ---- by layer, tag and name


def test_a_layer_that_reads_another_gets_its_view() -> None:
    with Arena(PLANS["hybrid page_major"]) as arena:
        mine, its = arena.layer(5), arena.layer(4)
        assert mine["key"].data_ptr() == its["key"].data_ptr()
        assert mine.names == its.names
        assert mine.kv is not None
        assert mine["key"].data_ptr() != arena.layer(0)["key"].data_ptr()


def test_a_layer_may_read_roles_here_and_there() -> None:
    reads = (Read(0, "full", ("key",)), Read(1, "full", ("value",)))
    made = make_plan(
        ModelSpec("reads", (Layer((FULL,)), Layer((FULL,)), Layer(reads=reads), Layer(reads=reads[:1]))), "1MB"
    )
    with Arena(made) as arena:
        assert arena.layer(2)["key"].data_ptr() == arena.layer(0)["key"].data_ptr()
        assert arena.layer(2)["value"].data_ptr() == arena.layer(1)["value"].data_ptr()
        assert arena.layer(2).kv is None, "keys and values of different layers are no pair"
        assert list(arena.layer(3).roles) == ["key"]


def test_a_layer_with_several_caches_is_asked_by_tag() -> None:
    with Arena(PLANS["dsa fp8"]) as arena:
        with pytest.raises(PlanError, match="layer 0 has the caches latent, indexer: say which tag"):
            arena.layer(0)
        with pytest.raises(UnknownName, match=r"tag of layer 0 'latents'; did you mean 'latent'\?"):
            arena.layer(0, "latents")
        with pytest.raises(PlanError, match=r"layer 9 has the caches \(none\)"):
            arena.layer(9)
        with pytest.raises(UnknownName, match=r"role of layer 0 under tag 'latent' 'laten'; did you mean 'latent'\?"):
            arena.layer(0, "latent")["laten"]
        with pytest.raises(UnknownName, match="unknown pool 'share'; did you mean 'shared'"):
            arena.pool("share")


def test_names_say_layer_group_role_rank_and_place() -> None:
    spec = ModelSpec("named", (Layer((FULL,)), Layer((STATE,)), Layer((FULL,), draft=True)))
    rank = Parallel(tp=2, tp_rank=1, cp=3, cp_rank=2)
    made = make_plan(spec, "1MB", parallel=rank, own_pools={"state": PoolRequest(pages=2, place=Place.PINNED)})
    with Arena(made) as arena:
        assert list(arena.tensors()) == [
            "layer.0/full/key@pp0.tp1.cp2:cpu",
            "layer.0/full/value@pp0.tp1.cp2:cpu",
            "layer.1/state/conv_state@pp0.tp1.cp2:pinned",
            "layer.1/state/ssm_state@pp0.tp1.cp2:pinned",
            "draft.2/full/key@pp0.tp1.cp2:cpu",
            "draft.2/full/value@pp0.tp1.cp2:cpu",
        ]


@given(
    st.lists(
        st.tuples(st.text("a./@:%", min_size=1), st.text("a./@:%", min_size=1)), min_size=2, max_size=2, unique=True
    )
)
def test_different_tags_and_roles_never_share_a_name(pairs: list[tuple[str, str]]) -> None:
    made = PLANS["dsa fp8"]
    one, other = (tensor_name(made, 0, tag, role, "cpu") for tag, role in pairs)
    assert one != other


def test_names_are_unique_over_ranks() -> None:
    ranks = [
        Parallel(tp=2, cp=2, pp=2, tp_rank=t, cp_rank=c, pp_rank=p) for t in (0, 1) for c in (0, 1) for p in (0, 1)
    ]
    names: list[str] = []
    for rank in ranks:
        with Arena(make_plan(DSA, "8MB", parallel=rank, block_tokens=64)) as arena:
            names += arena.tensors()
    assert len(set(names)) == len(names) == 8 * 2, "2 layers x 2 roles x 4 ranks of each stage"


@given(st.randoms(use_true_random=False))
def test_order_is_by_layer_then_role_whatever_the_order_of_declaration(chance: object) -> None:
    scales = [Role(f"{name}_scale", (2,), "float32") for name in ("key", "value")]  # type: ignore[arg-type]
    roles = [*FULL.roles, *scales, Role("mine", (4,), KEY.dtype)]
    chance.shuffle(roles)  # type: ignore[attr-defined]
    caches = [LayerCache("full", FULL.reach, tuple(roles)), NEAR, STATE]
    chance.shuffle(caches)  # type: ignore[attr-defined]
    with Arena(make_plan(ModelSpec("shuffled", (Layer(tuple(caches)), Layer(tuple(caches[:1])))), "4MB")) as arena:
        order = [name.partition("@")[0] for name in arena.tensors() if name.startswith("layer.0")]
    assert order == [
        "layer.0/full/key",
        "layer.0/window/key",
        "layer.0/full/value",
        "layer.0/window/value",
        "layer.0/full/key_scale",
        "layer.0/full/value_scale",
        "layer.0/state/conv_state",
        "layer.0/state/ssm_state",
        "layer.0/full/mine",
    ]
