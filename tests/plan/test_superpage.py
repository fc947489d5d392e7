"""The super-page search against brute force: every group tiles it, and no smaller size would have done."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.plan.superpage import GOOD, SPANS, Slice, search


@st.composite
def slices(draw: st.DrawFn) -> list[Slice]:
    align = st.sampled_from((16, 48, 80, 576))
    blocks = st.sampled_from((1, 1, 3, 4))
    pieces = []
    for _ in range(draw(st.integers(2, 4))):
        step = draw(align)
        pieces.append(Slice(step * draw(st.integers(1, 40)), draw(blocks), step))
    return pieces


def most_pages(piece: Slice, size: int) -> int:
    """The most pages of equal, aligned stride."""
    units = size // piece.unit
    return max(count for count in range(1, size // piece.page_bytes + 1) if units % count == 0)


def worst_padding(pieces: list[Slice], size: int) -> float:
    return max(1 - most_pages(piece, size) * piece.page_bytes / size for piece in pieces)


@settings(max_examples=200)
@given(slices())
def test_every_group_tiles_a_super_page_with_one_aligned_stride(pieces: list[Slice]) -> None:
    size, counts = search(pieces)
    for piece, count in zip(pieces, counts, strict=True):
        assert size % (count * piece.unit) == 0
        assert piece.page_bytes <= size // count
        assert count >= 1


@settings(max_examples=100)
@given(slices())
def test_the_super_page_is_the_smallest_good_one_or_as_tight_as_any_near(pieces: list[Slice]) -> None:
    step = math.lcm(*(piece.unit for piece in pieces))
    largest = max(piece.page_bytes for piece in pieces)
    sizes = range(-(-largest // step) * step, SPANS[0] * largest + 1, step)
    size, _ = search(pieces)
    good = [candidate for candidate in sizes if worst_padding(pieces, candidate) <= GOOD]
    if good:
        assert size == good[0]
    elif sizes:
        assert worst_padding(pieces, size) <= min(worst_padding(pieces, candidate) for candidate in sizes)


def test_pages_that_divide_one_another_need_no_padding_and_no_search() -> None:
    assert search([Slice(4096, 1, 16), Slice(16384, 1, 16)]) == (16384, (4, 1))


def test_a_state_of_many_megabytes_beside_small_pages_is_found_at_once() -> None:
    """Ling 2.5: 70 states of 4 MiB, pages of 184,320 bytes: by strides, since counts would be thousands."""
    size, counts = search([Slice(70 * 4 * 2**20, 1, 16), Slice(16 * 576 * 2 * 10, 1, 16)])
    assert size < 1.02 * 70 * 4 * 2**20
    assert counts[0] == 1
    assert counts[1] * 16 * 576 * 2 * 10 > 0.99 * size
