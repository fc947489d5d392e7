"""Sums and digests of the store: what C says is what hashlib and xxhash say, and without it all is the same."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvweave.store import Namespace, checksums, keys
from kvweave.store.checksums import IOBuffers
from kvweave.store.compiled import native
from kvweave.store.files import BufferedFile, DirectFile, aligned
from kvweave.store.striped_file import StripedFile
from kvweave.store.tier import Blob, whole
from tests.store.models import checksum_of

LENGTHS = [
    0,
    1,
    240,
    241,
    1023,
    1024,
    1025,
    4096,
    4097,
    32_767,
    65_535,
    65_536,
    66_000,
    131_072,
    131_073,
    262_144,
    1_049_999,
    (1 << 20) + 1024,
]


@pytest.fixture(params=["C", "Python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(checksums, "native", None)
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
    assert checksums.copy(target[shift : shift + length], source) == checksum_of(source)
    assert (target[shift : shift + length] == source).all()
    assert (target[:shift] == 7).all()
    assert (target[shift + length :] == 7).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_the_checksum_of_bytes_is_that_of_their_parts(length: int) -> None:
    assert checksums.checksum(bytes_of(length)) == checksum_of(bytes_of(length))


def test_a_copy_whose_time_is_over_has_no_sum() -> None:
    assert checksums.copy(np.empty(1 << 20, np.uint8), bytes_of(1 << 20), time.monotonic() - 1) is None
    assert checksums.copy(np.empty(1 << 20, np.uint8), bytes_of(1 << 20), time.monotonic() + 60) is not None


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
            assert checksums.copy(target, source) == checksum_of(target)
    finally:
        stop.set()
        writer.join()


@pytest.fixture(params=[0, os.O_DIRECT], ids=["cached", "direct"])
def flags(request: pytest.FixtureRequest) -> int:
    mode: int = request.param
    return os.O_RDWR | os.O_CREAT | mode


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("head", [0, 32, 4096])
@pytest.mark.parametrize("stripe", [1000, 4096, 4 << 20])
def test_what_is_written_and_read_is_equal_and_its_sum_that_of_what_stands_behind_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, head: int, stripe: int
) -> None:
    monkeypatch.setattr("kvweave.store.striped_file.STRIPE_BYTES", stripe)
    blob, target = bytes_of(head + length), aligned(head + length)
    files, io_buffers = StripedFile(tmp_path / "blob", os.O_RDWR | os.O_CREAT), IOBuffers(direct=False)
    files.write(0, [b"x" * 100])
    assert checksums.write(files, 100, blob, io_buffers) == checksum_of(blob)
    assert checksums.read(files, 100, target, head, io_buffers) == checksum_of(blob[head:])
    assert (target == blob).all()
    if length:
        assert checksums.read(files, 101, target, head, io_buffers) is None
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        checksums.read(files, 0, aligned(head + 5000), head, io_buffers)
    with pytest.raises(OSError, match="Bad file descriptor"):
        checksums.write(files, 0, aligned(head + 5000), io_buffers)


@pytest.mark.parametrize("start", [0, 4096, 516_096, 1_048_576])
@pytest.mark.parametrize("length", [*LENGTHS, 9_000_001])
@pytest.mark.parametrize("stripe", [4096, 4 << 20])
def test_sectors_hold_the_bytes_and_zeros_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, length: int, stripe: int
) -> None:
    monkeypatch.setattr("kvweave.store.striped_file.STRIPE_BYTES", stripe)
    files, io_buffers = StripedFile(tmp_path / "blob", os.O_RDWR | os.O_CREAT | os.O_DIRECT), IOBuffers(direct=True)
    io_buffers.memory[:] = 7
    source, target = bytes_of(length), aligned(length)
    for _ in range(2):  # a file that grows, and one that is long enough
        assert checksums.write(files, start, source, io_buffers) == checksum_of(source)
        assert checksums.read(files, start, target, 0, io_buffers) == checksum_of(source)
        assert (target == source).all()
    plain, padded = StripedFile(tmp_path / "blob", os.O_RDONLY), np.ones(-(-length // 4096) * 4096, np.uint8)
    assert plain.read(start, padded) == padded.nbytes
    assert padded.tobytes() == source.tobytes().ljust(padded.nbytes, b"\0")
    plain.close()
    files.close()


@pytest.mark.parametrize("length", [5000, 300_000, 4_200_000])
def test_a_direct_read_ends_where_a_file_does_though_it_ends_within_a_sector(tmp_path: Path, length: int) -> None:
    cached = StripedFile(tmp_path / "blob", os.O_RDWR | os.O_CREAT)
    source = bytes_of(length)
    cached.write(0, [source.data])
    files, io_buffers = StripedFile(tmp_path / "blob", os.O_RDWR | os.O_DIRECT), IOBuffers(direct=True)
    target = aligned(length)
    assert checksums.read(files, 0, target, 0, io_buffers) == checksum_of(source)
    assert (target == source).all()
    assert checksums.read(files, 0, aligned(length + 1), 0, io_buffers) is None
    assert checksums.read(files, 0, aligned(length + 4096), 0, io_buffers) is None
    assert checksums.read(files, 0, target, 0, io_buffers) is not None, "what was under way is over"


def test_a_disk_that_takes_no_more_says_so_and_works_on(tmp_path: Path, flags: int) -> None:
    files, io_buffers = StripedFile(tmp_path / "blob", flags), IOBuffers(direct=bool(flags & os.O_DIRECT))
    source, target = bytes_of(3 << 20), aligned(3 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checksums.write(files, 0, source, io_buffers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checksums.read(files, 0, target, 0, io_buffers) is None
    assert checksums.write(files, 0, source, io_buffers) == checksums.read(files, 0, target, 0, io_buffers)
    assert (target == source).all()


def test_a_forked_process_reads_and_writes_what_its_parent_opened(tmp_path: Path, flags: int) -> None:
    """The kernel knows nothing of its parent's transfers, and takes none."""
    files, io_buffers = StripedFile(tmp_path / "blob", flags), IOBuffers(direct=bool(flags & os.O_DIRECT))
    source, target = bytes_of(3 << 20), aligned(3 << 20)
    checksums.write(files, 0, source, io_buffers)
    child = os.fork()
    if not child:
        fine = checksums.read(files, 0, target, 0, io_buffers) == checksums.write(files, 4 << 20, source, io_buffers)
        os._exit(0 if fine and (target == source).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert checksums.read(files, 4 << 20, target, 0, io_buffers) is not None
    assert (target == source).all()


def test_signals_do_not_disturb_what_is_under_way(tmp_path: Path, flags: int) -> None:
    files, io_buffers = StripedFile(tmp_path / "blob", flags), IOBuffers(direct=bool(flags & os.O_DIRECT))
    source, target, seen = bytes_of(8 << 20), aligned(8 << 20), []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(20):
            assert checksums.write(files, 0, source, io_buffers) == checksums.read(files, 0, target, 0, io_buffers)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert (target == source).all()


@pytest.mark.parametrize("kind", [BufferedFile, DirectFile])
def test_blobs_are_moved_in_c_where_it_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BufferedFile]
) -> None:
    file, target = kind(tmp_path / "blobs", writable=True), aligned(4096 + 600_000)
    blob = Blob(bytes_of(600_000), 4096, lambda _: bytes(4096))
    file.write(0, blob)
    monkeypatch.setattr("kvweave.store.striped_file.StripedFile.read", None)
    monkeypatch.setattr("kvweave.store.striped_file.StripedFile.write", None)
    if vars(checksums)["native"]:
        file.write(0, blob)
        assert file.read(0, target)
    else:
        with pytest.raises(TypeError):
            file.write(0, blob)
        with pytest.raises(TypeError):
            file.read(0, target)
    file.close()


@pytest.mark.parametrize("kind", [BufferedFile, DirectFile])
def test_a_thread_has_one_set_of_buffers_however_often_it_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BufferedFile]
) -> None:
    made: list[bool] = []

    class Counted(checksums.IOBuffers):
        def __init__(self, *, direct: bool) -> None:
            super().__init__(direct=direct)
            made.append(direct)

    monkeypatch.setattr(checksums, "IOBuffers", Counted)
    file, blob = kind(tmp_path / "blobs", writable=True), Blob(bytes_of(600_000), 4096, lambda _: bytes(4096))
    for _ in range(3):
        file.write(0, blob)
        assert file.read(0, aligned(4096 + 600_000))
    file.close()
    assert len(made) == 1


def test_what_a_thread_had_under_way_is_given_back_with_it(tmp_path: Path) -> None:
    def contexts() -> int:
        return Path("/proc/self/maps").read_text().count("[aio]")

    file, blob, before = DirectFile(tmp_path / "blobs", writable=True), whole(bytes(100_000)), contexts()
    threads = [threading.Thread(target=file.write, args=(0, blob)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contexts() == before
    file.write(0, blob)
    assert contexts() == before + bool(vars(checksums)["native"])
    file.close()
    assert contexts() == before


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
