"""Token ids become one int32 array, from whatever they come in, and whatever is none has its words."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import BadTokens
from kvweave.prefix import as_tokens, prompt

MOST = 2**31 - 1


class Special(IntEnum):
    END = 7


@pytest.fixture(params=["native", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        for name in [name for name in vars(prompt.NumpyTokens) if not name.startswith("_")]:
            monkeypatch.setattr(prompt, name, getattr(prompt.NumpyTokens, name))
    elif vars(prompt)["take"] is prompt.NumpyTokens.take:
        pytest.skip("the C of prefix/ is not built")


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1000])
def test_a_list_of_ints_becomes_an_array_of_the_same(kind: type, count: int) -> None:
    edges = [0, 1, 2**15, 2**30 - 1, 2**30, MOST]
    tokens = kind([edges[n % len(edges)] for n in range(count)])
    array = as_tokens(tokens)
    assert array.dtype == np.int32
    assert array.tolist() == [*tokens]


@given(st.lists(st.integers(-5, 2**32), max_size=300))
def test_any_list_of_ints_is_taken_exactly_or_refused(tokens: list[int]) -> None:
    if all(0 <= token <= MOST for token in tokens):
        assert as_tokens(tokens).tolist() == tokens
    else:
        with pytest.raises(BadTokens):
            as_tokens(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [np.int64(3), np.int32(7)],
        [*np.arange(200, dtype=np.int64)],
        [3, np.uint8(7)],
        [3, Special.END],
        [3, True],
        np.arange(9, dtype=np.int64),
        np.arange(18, dtype=np.int32)[::2],
        range(9),
    ],
)
def test_other_whole_numbers_are_taken_too(tokens: list[int]) -> None:
    assert as_tokens(tokens).tolist() == [int(token) for token in tokens]
    assert as_tokens(tokens).dtype == np.int32


def test_an_array_of_int32_is_taken_as_it_is() -> None:
    tokens = np.arange(9, dtype=np.int32)
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 2.0], "whole numbers, got 1 axes of float64"),
        ([1, None], "whole numbers, got 1 axes of object"),
        ([True, False], "whole numbers, got 1 axes of bool"),
        (["a"], "whole numbers, got 1 axes of <U1"),
        ([[1, 2], [3, 4]], "whole numbers, got 2 axes"),
        ([[1, 2], [3]], "whole numbers, got list"),
        (5, "whole numbers, got 0 axes"),
        ([1, -1], "not be negative, got -1"),
        ([*range(200), -(2**31) - 1], "not be negative, got -2147483649"),
        (np.array([-(2**40)]), "not be negative, got -1099511627776"),
        (np.array([-3], np.int32), "not be negative, got -3"),
        ([1, MOST + 1], "fit 31 bits, got 2147483648"),
        ([2**63], "fit 31 bits, got 9223372036854775808"),
        ([2**64], "whole numbers, got 1 axes of object"),
    ],
)
def test_what_is_no_token_has_its_words(tokens: object, words: str) -> None:
    with pytest.raises(BadTokens, match=words):
        as_tokens(tokens)


def test_c_takes_lists_only_and_exactly_as_many() -> None:
    take = pytest.importorskip("kvweave.prefix._native").take
    with pytest.raises(TypeError, match="a list or a tuple"):
        take(range(3), np.empty(3, np.int32))
    with pytest.raises(ValueError, match="four bytes for every token"):
        take([1, 2, 3], np.empty(2, np.int32))


@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 200), st.integers(0, 200))
def test_two_runs_are_equal_up_to_their_first_difference(run: list[int], cut: int, change: int) -> None:
    one = np.array(run, np.int32)
    other = one[:cut].copy()
    other[change : change + 1] += 1
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert prompt.num_equal(one, other) == same
    assert prompt.num_equal(other, one) == same


@given(st.lists(st.integers(0, MOST), max_size=100), st.integers(0, 120), st.integers(1, 20))
def test_parts_of_a_run_are_its_bytes(run: list[int], start: int, size: int) -> None:
    tokens = np.array(run, np.int32)[1:]
    assert prompt.token_bytes(tokens, start, size) == tokens[start : start + size].tobytes()
    whole = [tokens[at : at + size] for at in range(start, len(tokens) - size + 1, size)]
    assert prompt.last_tokens(tokens, start, size) == np.array([block[-1] for block in whole], np.int32).tobytes()


@given(st.lists(st.integers(0, 1), max_size=60), st.integers(0, 70), st.integers(1, 6), st.integers(0, 60))
def test_blocks_are_equal_up_to_the_first_whose_last_token_differs(
    run: list[int], start: int, size: int, change: int
) -> None:
    tokens = np.array(run, np.int32)
    ends, other = prompt.last_tokens(tokens, start, size), tokens.copy()
    other[change : change + 1] += 1
    for cut in (len(other), max(0, len(other) - size)):
        at = [*range(start + size - 1, cut - 1, size)]  # the last token of a prompt is computed in any case
        same = next((i for i, place in enumerate(at) if place == change), len(at))
        assert prompt.num_blocks_equal(ends, other[:cut], start, size) == same


def test_c_asks_for_places_in_a_run() -> None:
    native, tokens = pytest.importorskip("kvweave.prefix._native"), np.arange(8, dtype=np.int32)
    for start, size in ((-1, 4), (0, 0), (0, -4)):
        with pytest.raises(ValueError, match="counted from 0 on"):
            native.token_bytes(tokens, start, size)
        with pytest.raises(ValueError, match="counted from 0 on"):
            native.last_tokens(tokens, start, size)
        with pytest.raises(ValueError, match="counted from 0 on"):
            native.num_blocks_equal(b"", tokens, start, size)
    with pytest.raises(TypeError, match="come last"):
        native.token_bytes(tokens, 0)
    with pytest.raises(OverflowError):
        native.token_bytes(tokens, 1 << 70, 4)
    assert native.last_tokens(tokens, (1 << 62), 1 << 62) == b""


@pytest.mark.parametrize("at", [0, 63, 99])
def test_a_negative_id_is_found_wherever_it_is(at: int) -> None:
    tokens = np.arange(100, dtype=np.int32)
    tokens[at] = -1
    with pytest.raises(BadTokens, match="-1"):
        as_tokens(tokens)
    with pytest.raises(BadTokens, match=str(-(2**40))):
        as_tokens(np.array([1, -(2**40)]))


def test_tokens_with_gaps_between_are_found_again() -> None:
    gapped = np.arange(18, dtype=np.int32)[::2]
    assert as_tokens(gapped).flags.c_contiguous
    assert prompt.num_equal(as_tokens(gapped), np.array([0, 2, 4, 7], np.int32)) == 3
