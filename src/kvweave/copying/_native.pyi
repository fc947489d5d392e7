from numpy import int64
from numpy.typing import NDArray

def copy(
    to: NDArray[int64],
    to_strides: tuple[int, int],
    source: NDArray[int64],
    source_strides: tuple[int, int],
    shape: tuple[int, int, int],
    streaming: bool,
    threads: int,
    /,
) -> None: ...
