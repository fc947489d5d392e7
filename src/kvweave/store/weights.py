"""A name for a model's weights that costs milliseconds: which checkpoint it is, not every byte of it.

Headers and sizes alone would give a model and each of its fine-tunes one name, since names, shapes and offsets are the
same; their KV must never meet. So some bytes out of the middle of each tensor are part of the digest, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kvweave.errors import StoreError

HEADER_BYTES = 100 << 20
"""The longest header that the format allows."""
SAMPLE_BYTES = 256
SAMPLES = 4096
"""Tensors of a file that are looked into; of more, those whose names have the smallest digests."""


def weights_digest(path: str | Path) -> str:
    """A digest of a safetensors file, or of all those in a directory: names, sizes, headers, and bytes of each tensor.

    Two checkpoints that differ only in bytes that were not read have the same digest. Where a revision is known (a
    commit of the model's repository), it is the better name.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise StoreError(f"{path}: no safetensors files; name the weights by a revision")
    digest = hashlib.sha256(b"kvweave weights 1\0")
    for file in files:
        for field in _facts(file):
            digest.update(len(field).to_bytes(8, "little") + field)
    return digest.hexdigest()


def _facts(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_BYTES, size - 8):
                raise StoreError(f"{path}: a header of {length} bytes in a file of {size}: this is no safetensors file")
            header = file.read(length)
            yield from (path.name.encode(), size.to_bytes(8, "little"), header)
            for start, stop in _looked_into(path, header):
                middle = 8 + length + max(start, (start + stop - SAMPLE_BYTES) // 2)
                yield os.pread(file.fileno(), min(SAMPLE_BYTES, stop - start), middle)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error


def _looked_into(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Where the tensors lie that are looked into, in bytes behind the header."""
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        ends = {name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in entries.items()}
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise StoreError(f"{path}: its header does not say what is in it: {error!r}") from None
    # By a hash of the names: the same tensors in every process, spread over all layers.
    chosen = sorted(ends, key=lambda name: hashlib.sha256(name.encode()).digest())[:SAMPLES]
    return [ends[name] for name in chosen if 0 <= ends[name][0] < ends[name][1]]
