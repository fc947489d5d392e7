from array import array

from kvweave.store.keys import Bytes

def digests(messages: Bytes, size: int, /) -> bytes: ...
def links(first: bytes, leaves: bytearray, /) -> bytes: ...
def sums(message: Bytes, /) -> bytes: ...
def copy(to: Bytes, source: Bytes, streaming: bool, until: float, /) -> bytes | None: ...

class Queue: ...  # a capsule

def queue(asynchronous: bool, /) -> Queue: ...
def read(
    fds: array[int],
    stripe: int,
    sector: int,
    start: int,
    to: Bytes,
    head: int,
    bounce: Bytes,
    piece: int,
    queue: Queue,
    /,
) -> bytes | None: ...
def write(
    fds: array[int], stripe: int, sector: int, start: int, source: Bytes, bounce: Bytes, piece: int, queue: Queue, /
) -> bytes: ...
