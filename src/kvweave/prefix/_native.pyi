from numpy import int32
from numpy.typing import NDArray

def take(tokens: list[object] | tuple[object, ...], to: NDArray[int32], /) -> bool: ...
