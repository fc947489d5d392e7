"""COPYING host memory at memory bandwidth, with the interpreter lock released. In C where a compiler was found."""

from kvweave.copying.blocks import IS_NATIVE, Bytes, Numbers, StridedBlocks, copy, copy_blocks
from kvweave.copying.payload import (
    PART_BYTES,
    BlockCopy,
    FieldRuns,
    Gathering,
    HostPayloadCopier,
    Landing,
    PartChecksums,
    PayloadCopier,
    StagedCopier,
    StagedPayloads,
)

__all__ = [
    "IS_NATIVE",
    "PART_BYTES",
    "BlockCopy",
    "Bytes",
    "FieldRuns",
    "Gathering",
    "HostPayloadCopier",
    "Landing",
    "Numbers",
    "PartChecksums",
    "PayloadCopier",
    "StagedCopier",
    "StagedPayloads",
    "StridedBlocks",
    "copy",
    "copy_blocks",
]
