"""Attention in C on the CPU keeps the contract, and some promises of its own."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.attention import AttentionOptions, open_attention
from kvweave.attention.cpu import IS_NATIVE
from kvweave.errors import BadRows, NoKernel
from kvweave.spec import Chunk, Full, Reach, SinkWindow, Window
from tests.attention.contract import AttentionContract, close
from tests.attention.worlds import Kind, World, wanted

pytestmark = pytest.mark.skipif(not IS_NATIVE, reason="the part in C was not built")


class TestCPU(AttentionContract):
    backend = "cpu"


@pytest.mark.parametrize("kind", [Kind(), Kind(heads=16, latent=(64, 16)), Kind(quant="int8")], ids=str)
def test_threads_do_not_change_a_bit(kind: Kind) -> None:
    world = World(kind, pages=100)
    step = world.step([2500, 40, 1100], [1, 40, 130])
    queries, attention = world.queries(step), open_attention(world.view, backend="cpu")
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(attention.attend(queries, step))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 200)), min_size=1, max_size=4),
    st.sampled_from([Full(), Window(700), Window(64), Chunk(512), SinkWindow(100, 333)]),
    st.sampled_from([(4, 4), (8, 1), (12, 2)]),
    st.sampled_from([(16, 16), (64, 64), (5, 5)]),
    st.sampled_from([0.0, 0.2]),
)
def test_random_steps_are_what_the_reference_says(
    rows: list[tuple[int, int]], reach: Reach, heads: tuple[int, int], sizes: tuple[int, int], nulls: float
) -> None:
    world = World(Kind(*heads, key_dim=32, value_dim=48), 60, *sizes)
    step = world.step([length for length, _ in rows], [min(count, length) for length, count in rows], nulls)
    queries, options = world.queries(step), AttentionOptions(reach=reach)
    found = open_attention(world.view, options, "cpu").attend(queries, step)
    close(found, wanted(world, queries, step, options))


def test_more_heads_than_a_tile_has_rows_share_a_key() -> None:
    world = World(Kind(heads=300, kv_heads=1, key_dim=16))
    step = world.step([700, 20], [1, 3])
    queries = world.queries(step)
    found = open_attention(world.view, backend="cpu").attend(queries, step)
    close(found, wanted(world, queries, step, AttentionOptions()))


@pytest.mark.parametrize("block", [-1, 1_000_000])
def test_a_block_that_is_not_there_is_an_error_and_not_a_crash(block: int) -> None:
    world = World(Kind())
    step = world.step([300, 40], [1, 1])
    (table,) = step.tables.values()
    table[0, 3] = block
    with pytest.raises(BadRows, match=f"block {block} is not among"):
        open_attention(world.view, backend="cpu").attend(world.queries(step), step)


@pytest.mark.parametrize("slot", [-2, 1_000_000])
def test_a_slot_that_is_not_there_is_refused_before_anything_is_written(slot: int) -> None:
    world = World(Kind())
    before = world.view["key"].clone()
    with pytest.raises(BadRows, match=f"slot {slot} is not among"):
        open_attention(world.view, backend="cpu").write(
            torch.ones(2, 2, 64), torch.ones(2, 2, 64), torch.tensor([40, slot])
        )
    assert torch.equal(world.view["key"][1:], before[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """One token is its own output: what comes out is the value, through float32 and back."""
    world = World(Kind(heads=1, kv_heads=1, key_dim=1024, value_dim=1024, dtype="float32"), pages=4)
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, 65519.0, 65520.0, 1e6, 5.96e-8, 2.98e-8, 6.1e-5, -1e-7])])
    values = torch.nn.functional.pad(values, (0, 16))
    attention = open_attention(world.view, backend="cpu")
    slot = world.first_page * 32
    attention.write(torch.zeros(1, 1, 1024), values.view(1, 1, -1), torch.tensor([slot]))
    step = world.step([1], [1])
    step.tables["full"][0, 0] = slot // 16
    found = attention.attend(torch.zeros(1, 1, 1024, dtype=dtype), step)
    assert torch.equal(found[0, 0], values.to(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_infinities_and_tiny_numbers_of_pages_are_read_as_they_are(dtype: str) -> None:
    world = World(Kind(heads=1, kv_heads=1, key_dim=16, value_dim=16, dtype=dtype), pages=4)
    attention, slot = open_attention(world.view, backend="cpu"), world.first_page * 32
    rows = torch.tensor([torch.inf, -torch.inf, 6e-8, -6e-8, 6.1e-5, 65504, -1, 0] * 2).to(world.view["key"].dtype)
    attention.write(torch.zeros_like(rows).view(1, 1, -1), rows.view(1, 1, -1), torch.tensor([slot]))
    step = world.step([1], [1])
    step.tables["full"][0, 0] = slot // 16
    assert torch.equal(attention.attend(torch.zeros(1, 1, 16), step)[0, 0], rows.float())


def test_layers_and_queries_that_it_cannot_compute_with_are_refused() -> None:
    world = World(Kind())
    with pytest.raises(NoKernel, match="1024 are the most"):
        open_attention(World(Kind(key_dim=1040), pages=4).view, backend="cpu")
    with pytest.raises(BadRows, match="queries of torch.float64"):
        step = world.step([10], [1])
        open_attention(world.view, backend="cpu").attend(world.queries(step, torch.float64), step)


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
def test_parts_of_long_contexts_take_the_memory_of_their_rows() -> None:
    """Not that of the largest item for each part: fresh pages for every call took longer than attention itself."""
    import resource

    world = World(Kind(), pages=40)
    step = world.step([16_384] * 8, [1] * 8)
    queries, attention = world.queries(step), open_attention(world.view, AttentionOptions(), "cpu")
    attention.attend(queries, step)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    attention.attend(queries, step)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    rows = 8 * (16_384 // 512) * queries.shape[1]
    assert faults < 100 + rows * (attention.value_dim + 16) * 4 // 4096
