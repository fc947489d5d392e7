"""The super-page search against brute force: every group tiles it, and no other size would waste less."""

from __future__ import annotations

import math
import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.plan.superpage import GOOD, MOST_PADDING, NOT_FULL, SCATTERED, SPANS, Slice, search

AMPLE = 1 << 40


@st.composite
def slices(draw: st.DrawFn) -> list[Slice]:
    align = st.sampled_from((16, 48, 80, 576))
    blocks = st.sampled_from((1, 1, 3, 4))
    pieces = []
    for _ in range(draw(st.integers(2, 4))):
        step = draw(align)
        pieces.append(
            Slice(step * draw(st.integers(1, 40)), draw(blocks), step, draw(st.integers(1, 50)), draw(st.booleans()))
        )
    return pieces


def most_pages(piece: Slice, size: int) -> int:
    """The most pages of equal, aligned stride."""
    units = size // piece.unit
    return max(count for count in range(1, size // piece.page_bytes + 1) if units % count == 0)


def worst_padding(pieces: list[Slice], size: int) -> float:
    return max(1 - most_pages(piece, size) * piece.page_bytes / size for piece in pieces)


def needed_bytes(pieces: list[Slice], size: int, pages: tuple[int, ...] = ()) -> int:
    counts = pages or [most_pages(piece, size) for piece in pieces]
    full = sum(math.ceil(piece.held_pages / count) for piece, count in zip(pieces, counts, strict=True))
    scatters = any(piece.scatters and count > 1 for piece, count in zip(pieces, counts, strict=True))
    return (full + (SCATTERED if scatters else 0) + 1) * size


def waste(pieces: list[Slice], size: int, memory: int) -> float:
    not_full = (NOT_FULL * len(pieces) + 1) * size
    return max(GOOD, worst_padding(pieces, size)) + not_full / memory


def near_sizes(pieces: list[Slice]) -> list[int]:
    """Those with so little padding that they are looked for."""
    step = math.lcm(*(piece.unit for piece in pieces))
    largest = max(piece.page_bytes for piece in pieces)
    sizes = range(-(-largest // step) * step, SPANS[0] * largest + 1, step)
    return [size for size in sizes if worst_padding(pieces, size) < MOST_PADDING / (1 + MOST_PADDING)]


@settings(max_examples=200)
@given(slices(), st.integers(0, 1 << 30))
def test_every_group_tiles_a_super_page_with_one_aligned_stride(pieces: list[Slice], memory: int) -> None:
    size, counts = search(pieces, memory)
    for piece, count in zip(pieces, counts, strict=True):
        assert size % (count * piece.unit) == 0
        assert piece.page_bytes <= size // count
        assert count >= 1


@settings(max_examples=100)
@given(slices(), st.integers(1, 1 << 24))
def test_no_size_near_wastes_less_of_the_memory_among_those_with_which_the_sequence_fits(
    pieces: list[Slice], memory: int
) -> None:
    fitting = [size for size in near_sizes(pieces) if needed_bytes(pieces, size) <= memory]
    size, counts = search(pieces, memory)
    if fitting:
        assert needed_bytes(pieces, size, counts) <= memory
        assert waste(pieces, size, memory) <= min(waste(pieces, other, memory) for other in fitting) + 1e-9


@settings(max_examples=100)
@given(slices())
def test_where_no_size_fits_it_is_the_one_that_needs_the_least(pieces: list[Slice]) -> None:
    size, counts = search(pieces, 1)
    for other in near_sizes(pieces):
        assert needed_bytes(pieces, size, counts) <= needed_bytes(pieces, other)


def test_the_least_memory_is_the_same_however_little_there_is() -> None:
    for seed in range(300):
        rng, pieces = random.Random(seed), []
        for _ in range(rng.randrange(1, 5)):
            kernel_bytes, held_pages = 16 * rng.choice([1, 3, 8, 17, 40]), rng.randrange(1, 60)
            pieces.append(Slice(kernel_bytes, rng.choice([1, 2, 4]), 1, held_pages, rng.random() < 0.4))
        least = needed_bytes(pieces, *search(pieces, 1))
        for memory in (least - 1, least):
            assert needed_bytes(pieces, *search(pieces, memory)) == least


def test_pages_that_divide_one_another_need_no_padding_and_no_search() -> None:
    assert search([Slice(4096, 1, 16), Slice(16384, 1, 16)], AMPLE) == (16384, (4, 1))


def test_a_state_of_many_megabytes_beside_small_pages_is_found_at_once() -> None:
    """Ling 2.5: 70 states of 4 MiB, pages of 184,320 bytes: by strides, since counts would be thousands."""
    size, counts = search([Slice(70 * 4 * 2**20, 1, 16), Slice(16 * 576 * 2 * 10, 1, 16)], AMPLE)
    assert size < 1.02 * 70 * 4 * 2**20
    assert counts[0] == 1
    assert counts[1] * 16 * 576 * 2 * 10 > 0.99 * size


def test_in_little_memory_a_super_page_is_small_though_it_pads_more() -> None:
    """The pages of DeepSeek-V4-flash, in KiB: 112 of the largest with less than 1% of padding, or one with 7%."""
    pieces = [Slice(size << 10, 1, 1 << 10) for size in (688, 84, 21, 672, 168, 20, 640)]
    sizes = [search(pieces, memory << 30)[0] for memory in (1024, 16, 2)]
    assert sizes[0] > 3 * sizes[1] > 3 * sizes[2]
    assert worst_padding(pieces, sizes[0]) <= GOOD < worst_padding(pieces, sizes[1])


def test_a_small_page_beside_a_huge_one_takes_no_memory_to_plan() -> None:
    tracemalloc.start()
    search([Slice(64, 1, 64), Slice(2**31, 1, 64)], 2**40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
