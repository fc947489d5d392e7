"""COPYING host memory at memory bandwidth, with the interpreter lock released. In C where a compiler was found."""

from kvweave.copying.blocks import IS_NATIVE, Bytes, Numbers, StridedBlocks, copy, copy_blocks
from kvweave.copying.payload import (
    PART_BYTES,
    BlockCopy,
    Fields,
    Gathering,
    HostPayloadCopier,
    Landing,
    PartSums,
    PayloadCopier,
    StagedCopier,
)

__all__ = [
    "IS_NATIVE",
    "PART_BYTES",
    "BlockCopy",
    "Bytes",
    "Fields",
    "Gathering",
    "HostPayloadCopier",
    "Landing",
    "Numbers",
    "PartSums",
    "PayloadCopier",
    "StagedCopier",
    "StridedBlocks",
    "copy",
    "copy_blocks",
]
