"""Sums and digests of the store: what C says is what hashlib and xxhash say, and without it all is the same."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvweave.store import Namespace, keys, sums
from kvweave.store.compiled import native
from kvweave.store.files import DirectFile, File, aligned
from kvweave.store.stripes import Stripes

LENGTHS = [0, 1, 240, 241, 1023, 1024, 1025, 4096, 4097, 131_072, 131_073, 262_144, 1_049_999, (1 << 20) + 1024]


@pytest.fixture(params=["C", "Python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(sums, "native", None)
        monkeypatch.setattr(keys, "native", None)
    elif not native:
        pytest.skip("the store's C is not built for this machine")


def bytes_of(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(random.Random(length).randbytes(length), np.uint8)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shift", [0, 1, 32])
def test_a_copy_is_equal_and_its_sum_that_of_the_source(length: int, shift: int) -> None:
    source, target = bytes_of(length), aligned(length + shift + 64)
    target[:] = 7
    assert sums.copy(target[shift : shift + length], source) == xxhash.xxh3_64_intdigest(source.data)
    assert (target[shift : shift + length] == source).all()
    assert (target[:shift] == 7).all()
    assert (target[shift + length :] == 7).all()


def test_a_copy_whose_time_is_over_has_no_sum() -> None:
    assert sums.copy(np.empty(1 << 20, np.uint8), bytes_of(1 << 20), time.monotonic() - 1) is None
    assert sums.copy(np.empty(1 << 20, np.uint8), bytes_of(1 << 20), time.monotonic() + 60) is not None


@pytest.mark.parametrize("length", [5000, 1 << 20, (1 << 21) + 33])
def test_the_sum_is_of_what_was_written_whoever_writes_to_the_source_meanwhile(length: int) -> None:
    source, target, stop = np.zeros(length, np.uint8), aligned(length), threading.Event()

    def scribble() -> None:
        for number in itertools.cycle(range(256)):
            source[:] = number
            source[-64:] = 255 - number
            if stop.is_set():
                return

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(200):
            assert sums.copy(target, source) == xxhash.xxh3_64_intdigest(target.data)
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("head", [0, 32, 4096])
@pytest.mark.parametrize("stripe", [1000, 4096, 4 << 20])
def test_a_read_is_equal_and_its_sum_that_of_what_stands_behind_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, head: int, stripe: int
) -> None:
    monkeypatch.setattr("kvweave.store.stripes.STRIPE_BYTES", stripe)
    blob, target = bytes_of(head + length), aligned(head + length)
    files, bounce = Stripes(tmp_path / "blob", os.O_RDWR | os.O_CREAT), aligned(300_000)
    files.write(0, [b"x" * 100, blob.data])
    assert sums.read(files, 100, target, head, bounce) == xxhash.xxh3_64_intdigest(blob[head:].data)
    assert (target == blob).all()
    if length:
        assert sums.read(files, 101, target, head, bounce) is None
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        sums.read(files, 0, aligned(head + 5000), head, bounce)


@pytest.mark.parametrize("kind", [File, DirectFile])
def test_blobs_are_read_in_c_where_it_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[File]
) -> None:
    file, target = kind(tmp_path / "blobs", writable=True), aligned(4096 + 100_000)
    file.write(0, [bytes(4096), bytes(102_400)])
    monkeypatch.setattr("kvweave.store.stripes.Stripes.read", None)
    if vars(sums)["native"]:
        assert sums.read(file._stripes, 0, target, 4096, file._bounce()[: file.bounce_bytes], file.sector) is not None
    else:
        with pytest.raises(TypeError):
            file.read(0, target)
    file.close()


@pytest.mark.parametrize("size", [4, 44, 52, 56, 60, 64, 128, 1000, 1024])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40])
def test_digests_are_those_of_hashlib_message_by_message(size: int, count: int) -> None:
    messages = bytes_of(size * count)
    leaves = [hashlib.sha256(messages[at : at + size].data).digest() for at in range(0, size * count, size)]
    assert keys._digests(messages, size) == b"".join(leaves)
    first = hashlib.sha256(b"first").digest()
    links, last = [], first
    for leaf in leaves:
        last = hashlib.sha256(last + leaf).digest()
        links.append(last)
    assert keys._links(first, bytearray(b"".join(leaves))) == b"".join(links)


def test_the_prefixes_of_a_prompt_are_these() -> None:
    made = keys.prompt([*range(8192)], Namespace("m"), 256)
    assert made.prefixes[0].tobytes().hex() == "e5ca395f2c17e3b03156d9a867cf40fe15d3a7fe8148f7c85bcee9913813290d"
    assert made.prefixes[-1].tobytes().hex() == "21e2435d6f9ed2158d01f4dcbb158d501bd5d0986528e0cf6f53c8bdefd3c103"
