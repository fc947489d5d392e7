"""Sizes as people write them, to the byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import PlanError
from kvweave.units import DISK_BYTES, format_bytes, format_size, parse_bytes, parse_directory


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80G", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5KiB", 1536),
        ("0.1GiB", 107374182),
        ("512", 512),
        ("512b", 512),
        (" 2 TiB ", 2 * 2**40),
        (7, 7),
    ],
)
def test_a_size_is_what_it_says(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@given(st.integers(1, 2**70))
def test_whole_bytes_are_never_rounded(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "80 GiB 3", "80XB", "-1", "1e9", "0", 0, -1, "0.0001", True, None, 1.5])
def test_what_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(PlanError) as error:
        parse_bytes(text, what="reserve")
    assert str(text) in str(error.value) or "0" in str(error.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.50 KiB"),
        (80 * 2**30, "80.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (0.5, "0.5 B"),
    ],
)
def test_a_size_is_written_for_people(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (0, "0 B"),
        (1000, "1 KB"),
        (1536, "1.50 KiB"),
        (64 * 10**9, "64 GB"),
        (80 * 2**30, "80 GiB"),
        (2 * 10**12, "2 TB"),
        (1500 * 10**9, "1,500 GB"),
        (5 * 2**40, "5 TiB"),
    ],
)
def test_sizes_are_said_as_people_write_them(size: int, says: str) -> None:
    assert format_size(size) == says
    if size:
        assert parse_bytes(says.replace(",", "")) == size


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/var/kv:100GiB", (Path("/var/kv"), 100 * 2**30)),
        ("/var/kv", (Path("/var/kv"), DISK_BYTES)),
        ("a:b", (Path("a:b"), DISK_BYTES)),
        ("a:1/b", (Path("a:1/b"), DISK_BYTES)),
        ("a:b:7", (Path("a:b"), 7)),
    ],
)
def test_a_directory_may_say_how_much_it_holds(text: str, place: tuple[Path, int]) -> None:
    assert parse_directory(text) == place


def test_a_directory_of_a_size_that_is_none_is_refused_rather_than_made() -> None:
    for size in ("10XB", "-5", "+5GiB", ".5GiB", " 5 apples"):
        with pytest.raises(PlanError, match=f"cannot read '{re.escape(size)}'"):
            parse_directory(f"/var/kv:{size}")
    with pytest.raises(PlanError, match="8 EiB"):
        parse_directory("/var/kv:99999999TB")
