"""COPYING bytes of the host at the memory's speed, the interpreter let go meanwhile. Compiled where it can be."""

from kvweave.copying.blocks import IS_NATIVE, Bytes, StridedBlocks, copy, copy_blocks

__all__ = ["IS_NATIVE", "Bytes", "StridedBlocks", "copy", "copy_blocks"]
