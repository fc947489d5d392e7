"""COPYING bytes of the host at the memory's speed, the interpreter let go meanwhile. Compiled where it can be."""

from kvweave.copying.blocks import IS_NATIVE, Bytes, StridedBlocks, copy, copy_blocks
from kvweave.copying.payload import BlockCopy, HostPayloadCopier, PayloadCopier

__all__ = [
    "IS_NATIVE",
    "BlockCopy",
    "Bytes",
    "HostPayloadCopier",
    "PayloadCopier",
    "StridedBlocks",
    "copy",
    "copy_blocks",
]
