"""Bytes as people write them: "80GiB", "512 MB", 1024; and directories with a size: "/var/kv:100GiB"."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from kvweave.errors import PlanError

DISK_BYTES = 20 << 30
"""The size of a directory, unless given."""
MOST_DISK_BYTES = 2**63 - 1
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}{suffix}": 1024**power for power, letter in enumerate("kmgt", 1) for suffix in ("ib", "i", "")}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}


def parse_bytes(size: int | str, *, what: str = "memory", least: int = 1) -> int:
    """`"80GiB"` -> 85899345920. GiB, G are powers of 1024, GB is a power of 1000."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise PlanError(f"{what} must be bytes or text such as '80GiB', not {size!r}")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise PlanError(f"cannot read {size!r:.80} as a size; write for example 80GiB, 512MiB or 1000000")
        size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if size < least:
        raise PlanError(f"{what} must {'be more than 0 bytes' if least else 'not be negative'}, got {size}")
    return size


def parse_directory(text: str) -> tuple[Path, int]:
    """`"/var/kv:100GiB"` -> the directory, and how much of it; 20 GiB where no size is given.

    Of a colon that is followed by no number, or by a further folder, the name itself is meant.
    """
    match = re.fullmatch(r"(.+):(\s*[-+.]?[0-9][^/]*)", text)
    if not text or text.startswith(":"):
        raise PlanError(f"a directory is DIR or DIR:SIZE, for example /var/kv:100GiB, not {text!r}")
    if match is None:
        return Path(text), DISK_BYTES
    size = parse_bytes(match[2], what="the size of a directory")
    if size > MOST_DISK_BYTES:
        raise PlanError(f"a directory of {size} bytes: {MOST_DISK_BYTES} bytes (8 EiB) at most")
    return Path(match[1]), size


def format_bytes(num_bytes: float) -> str:
    """1536 -> "1.50 KiB"; exact below 1 KiB."""
    size = float(num_bytes)
    if abs(size) < 1024:
        return f"{size:,.6g} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:,.2f} {unit}"
    return f"{size / 1024:,.2f} TiB"


def format_size(num_bytes: int) -> str:
    """As people write it: 64000000000 -> "64 GB", 85899345920 -> "80 GiB"; with decimals where neither is whole."""
    for power, letter in reversed([*enumerate("KMGT", 1)]):
        for unit, base in ((f"{letter}iB", 1024), (f"{letter}B", 1000)):
            if num_bytes and num_bytes % base**power == 0:
                return f"{num_bytes // base**power:,} {unit}"
    return format_bytes(num_bytes).replace(".00 ", " ")
