"""COPYING host memory at memory bandwidth, with the interpreter lock released. In C where a compiler was found."""

from kvweave.copying.blocks import IS_NATIVE, Bytes, Numbers, StridedBlocks, copy, copy_blocks
from kvweave.copying.payload import BlockCopy, HostPayloadCopier, Landing, PayloadCopier, StagedCopier

__all__ = [
    "IS_NATIVE",
    "BlockCopy",
    "Bytes",
    "HostPayloadCopier",
    "Landing",
    "Numbers",
    "PayloadCopier",
    "StagedCopier",
    "StridedBlocks",
    "copy",
    "copy_blocks",
]
