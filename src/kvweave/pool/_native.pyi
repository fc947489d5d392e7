from numpy import int32, int64
from numpy.typing import NDArray

def share(
    holders: NDArray[int64], pages: NDArray[int32], evictable_in: NDArray[int64], per_superpage: int, /
) -> int: ...
def enter(holders: NDArray[int64], pages: NDArray[int32], /) -> int: ...
def prune(holders: NDArray[int64], pages: NDArray[int32], /) -> None: ...
def release(
    holders: NDArray[int64],
    pages: NDArray[int32],
    evictable_in: NDArray[int64],
    per_superpage: int,
    out: NDArray[int32],
    /,
) -> tuple[int, int]: ...
def leave(
    holders: NDArray[int64],
    pages: NDArray[int32],
    evictable_in: NDArray[int64],
    per_superpage: int,
    out: NDArray[int32],
    /,
) -> tuple[int, int]: ...
