"""Blocks arrive to the byte and nothing beside them changes, compiled or not, streamed or not, by any threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.copying import IS_NATIVE, Bytes, StridedBlocks, blocks, copy, copy_blocks
from kvweave.errors import BadCopy


@pytest.fixture(params=["native", "native, streaming", "numpy"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which means bytes are copied: each test holds for all."""
    if request.param == "numpy":
        monkeypatch.setattr(blocks, "_native", None)
    elif not IS_NATIVE:
        pytest.skip("no C compiler was there")
    monkeypatch.setattr(blocks, "STREAMED_BYTES", 0 if "streaming" in request.param else 1 << 60)
    monkeypatch.setattr(blocks, "THREAD_BYTES", 64)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    return str(request.param)


def noise(num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def numbers(*some: int) -> np.ndarray:
    return np.array(some, np.int64)


def run_by_run(to: StridedBlocks, source: StridedBlocks, shape: tuple[int, int, int]) -> None:
    """What `copy_blocks` promises, said in the plainest way."""
    for number in range(len(to.starts)):
        for plane in range(shape[0]):
            for row in range(shape[1]):
                ends = []
                for side in (to, source):
                    at = int(side.starts[number]) + plane * side.strides[0] + row * side.strides[1]
                    memory = side.memories[0 if side.memory_index is None else int(side.memory_index[number])]
                    ends.append(memory[at : at + shape[2]])
                ends[0][:] = ends[1]


@pytest.mark.usefixtures("means")
@pytest.mark.parametrize("threads", [1, 3])
def test_runs_of_any_length_go_from_any_address_to_any_address(threads: int) -> None:
    source = noise(4096)
    for size in range(201):
        for to_shift, source_shift in ((0, 0), (1, 0), (0, 1), (3, 61), (63, 5), (33, 31)):
            to = np.full(512, 0xEE, np.uint8)
            copy(to[to_shift : to_shift + size], source[source_shift : source_shift + size], threads=threads)
            assert np.array_equal(to[to_shift : to_shift + size], source[source_shift : source_shift + size])
            assert (to[:to_shift] == 0xEE).all()
            assert (to[to_shift + size :] == 0xEE).all()


@pytest.mark.usefixtures("means")
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_rows_of_132_bytes_are_packed_and_unpacked(threads: int) -> None:
    """16 rows a page, pages in any order in lanes of 40 pages, three layers."""
    page, lane, layers = 16 * 132, 40 * 16 * 132, 3
    pool, ids = noise(layers * lane), np.random.default_rng(1).permutation(40)[:20]
    chunks = [np.zeros(10 * layers * page, np.uint8) for _ in range(2)]
    places, memory_index = np.arange(20) % 10 * layers * page, np.arange(20) // 10
    packed = StridedBlocks(chunks, places, (0, page), memory_index)
    copy_blocks(packed, StridedBlocks([pool], ids * page, (0, lane)), (1, layers, page), threads=threads)
    expected = pool.reshape(layers, 40, page)[:, ids].transpose(1, 0, 2)
    assert np.array_equal(np.concatenate(chunks), expected.ravel())
    back = np.full_like(pool, 7)
    copy_blocks(StridedBlocks([back], ids * page, (0, lane)), packed, (1, layers, page), threads=threads)
    assert np.array_equal(back.reshape(layers, 40, page)[:, ids], pool.reshape(layers, 40, page)[:, ids])
    others = np.setdiff1d(np.arange(40), ids)
    assert (back.reshape(layers, 40, page)[:, others] == 7).all()


@given(data=st.data())
def test_all_means_do_what_copying_run_by_run_does(data: st.DataObject) -> None:
    count, planes, rows, size = (data.draw(st.integers(1, most)) for most in (5, 3, 4, 300))
    gaps = [data.draw(st.integers(0, 70)) for _ in range(4)]
    sides = []
    for row_gap, plane_gap in (gaps[:2], gaps[2:]):
        row = size + row_gap
        plane = rows * row + plane_gap
        lead = data.draw(st.integers(0, 70))
        order = np.array(data.draw(st.permutations(range(count))), np.int64)
        sides.append((lead + order * planes * plane, (plane, row), lead + count * planes * plane))
    (to_starts, to_strides, to_bytes), (starts, strides, num_bytes) = sides
    source, found = StridedBlocks([noise(num_bytes)], starts, strides), []
    shape, threads = (planes, rows, size), data.draw(st.integers(1, 5))

    def filled(by: object) -> None:
        memory = np.full(to_bytes, 0xEE, np.uint8)
        by(StridedBlocks([memory], to_starts, to_strides))  # type: ignore[operator]
        found.append(memory)

    filled(lambda to: run_by_run(to, source, shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "THREAD_BYTES", 1)
        for streamed_bytes in (0, 1 << 60):
            patch.setattr(blocks, "STREAMED_BYTES", streamed_bytes)
            filled(lambda to: copy_blocks(to, source, shape, threads=threads))
        patch.setattr(blocks, "_native", None)
        filled(lambda to: copy_blocks(to, source, shape, threads=threads))
    assert all(np.array_equal(found[0], memory) for memory in found[1:])


@pytest.mark.usefixtures("means")
def test_what_does_not_fit_is_refused_and_nothing_moves() -> None:
    to, source = np.full(100, 0xEE, np.uint8), noise(100)
    at = numbers(0)
    read_only = noise(100)
    read_only.flags.writeable = False
    for target, origin, shape, why in (
        (
            StridedBlocks([to], numbers(0, 50)),
            StridedBlocks([source], numbers(0, 51)),
            (1, 1, 50),
            "block 1 spans bytes 51 to 101",
        ),
        (StridedBlocks([to], numbers(-1)), StridedBlocks([source], at), (1, 1, 50), "block 0 spans bytes -1 to 49"),
        (StridedBlocks([to], at, (0, 30)), StridedBlocks([source], at), (1, 4, 20), "spans bytes 0 to 110"),
        (StridedBlocks([to], at, (-1, 0)), StridedBlocks([source], at), (2, 1, 20), "spans bytes -1 to 20"),
        (StridedBlocks([to], at), StridedBlocks([source], numbers(0, 1)), (1, 1, 1), "2 blocks of"),
        (StridedBlocks([to], at), StridedBlocks([source], at), (1, 1, -1), "1 blocks of"),
        (
            StridedBlocks([to], at, memory_index=numbers(1)),
            StridedBlocks([source], at),
            (1, 1, 1),
            "other than the 1 given",
        ),
        (
            StridedBlocks([to], at, memory_index=numbers(0, 0)),
            StridedBlocks([source], at),
            (1, 1, 1),
            "other than the 1 given",
        ),
        (StridedBlocks([read_only], at), StridedBlocks([source], at), (1, 1, 1), "read-only"),
        (StridedBlocks([to[::2]], at), StridedBlocks([source], at), (1, 1, 1), "one run of bytes"),
        (StridedBlocks([to.view(np.int32)], at), StridedBlocks([source], at), (1, 1, 1), "one run of bytes, not int32"),
    ):
        with pytest.raises(BadCopy, match=why):
            copy_blocks(target, origin, shape)
    with pytest.raises(BadCopy, match="100 bytes do not go into 99"):
        copy(to[:99], source)
    assert (to == 0xEE).all()


@pytest.mark.usefixtures("means")
def test_a_copy_of_nothing_is_no_error() -> None:
    nothing, some = np.empty(0, np.uint8), noise(10)
    copy(nothing, nothing)
    copy_blocks(StridedBlocks([some], numbers()), StridedBlocks([some], numbers()), (1, 1, 5))
    copy_blocks(StridedBlocks([nothing], numbers(0)), StridedBlocks([some], numbers(3)), (2, 0, 5))
    assert (some == noise(10)).all(), "nothing was to be written"


@pytest.mark.skipif(not IS_NATIVE, reason="no C compiler was there")
def test_others_go_on_while_bytes_are_copied() -> None:
    to, source = np.zeros(256 << 20, np.uint8), np.ones(256 << 20, np.uint8)
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    other.start()
    before = turns
    copy(to, source)
    during = turns - before
    over.set()
    other.join()
    assert during > 100
    assert to[-1] == 1
