"""COPYING host memory at memory bandwidth, with the interpreter lock released. In C where a compiler was found."""

from kvweave.copying.blocks import IS_NATIVE, Bytes, StridedBlocks, copy, copy_blocks

__all__ = ["IS_NATIVE", "Bytes", "StridedBlocks", "copy", "copy_blocks"]
