"""Files in stripes are one run of bytes, whatever is written across their ends."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvweave.store.striped_file import FILES, StripedFile


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.store.striped_file.STRIPE_BYTES", 64)


@pytest.fixture
def files(tmp_path: Path) -> StripedFile:
    return StripedFile(tmp_path / "f", os.O_RDWR | os.O_CREAT)


def test_writes_anywhere_and_in_any_pieces_are_those_to_one_file(files: StripedFile) -> None:
    chance, whole = random.Random(1), bytearray(4096)
    files.write(0, [bytes(whole)])
    for _ in range(300):
        data, start = chance.randbytes(chance.randrange(700)), chance.randrange(3000)
        axis_slices = sorted(chance.randrange(len(data) + 1) for _ in range(3))
        files.write(start, [data[a:b] for a, b in zip([0, *axis_slices], [*axis_slices, len(data)], strict=True)])
        whole[start : start + len(data)] = data
        start = chance.randrange(3000)
        target = np.empty(chance.randrange(1000), np.uint8)
        assert files.read(start, target) == len(target)
        assert target.tobytes() == whole[start : start + len(target)]


def test_every_file_gets_its_turn(files: StripedFile) -> None:
    files.write(0, [bytes(64 * FILES + 1)])
    assert [os.fstat(fd).st_size for fd in files.fds] == [65] + [64] * (FILES - 1)


def test_what_lies_behind_the_end_of_its_file_is_not_held_and_not_read(files: StripedFile) -> None:
    files.write(0, [bytes(640)])
    ends = np.arange(1, 1000)
    assert (files.hold(ends) == (ends <= 640)).all()
    assert files.read(600, np.empty(41, np.uint8)) == 40


def test_files_that_cannot_all_be_opened_leave_none_open(tmp_path: Path) -> None:
    StripedFile(tmp_path / "f", os.O_RDWR | os.O_CREAT).close()
    (tmp_path / "f-2").unlink()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        StripedFile(tmp_path / "f", os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == before


def test_discarded_bytes_are_zeros_and_take_no_room(files: StripedFile, tmp_path: Path) -> None:
    files.stripe_bytes, start = 2 << 20, 1 << 20  # the end of a stripe, and all of the next
    data = np.full(3 << 20, 7, np.uint8)
    files.write(start, [data.data])

    def num_bytes() -> int:
        return sum(os.fstat(fd).st_blocks for fd in files.fds) * 512

    assert num_bytes() >= 3 << 20
    files.discard(start + 4096, 2 << 20)
    assert num_bytes() <= 3 << 19
    assert files.read(start, found := np.zeros_like(data)) == data.nbytes
    data[4096:][: 2 << 20] = 0
    assert np.array_equal(found, data)
    with pytest.raises(OSError, match="Bad file descriptor"):
        StripedFile(tmp_path / "f", os.O_RDONLY).discard(0, 4096)
