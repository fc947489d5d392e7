"""How much memory this process may still take: what the machine has available, and what its control groups allow.

Memory that is promised and not there is not refused by Linux: it kills a process later, and perhaps another one. So
code that takes as much as a user asks for checks here first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvweave.errors import OutOfMemory
from kvweave.units import format_bytes

MARGIN_BYTES = 1 << 30
"""What stays free for others, or a sixteenth of what there is, if that is less."""
SMALL_BYTES = 1 << 20
"""Smaller sizes are not checked: the check takes longer than the allocation."""


def check_memory(where: str, wanted_bytes: int) -> None:
    """Raises `OutOfMemory` if `wanted_bytes` would leave less than a margin for others; `where` names what they are
    for."""
    if wanted_bytes <= SMALL_BYTES:
        return
    available = available_bytes()
    if available is None:
        return
    margin = min(MARGIN_BYTES, available // 16)
    if wanted_bytes > available - margin:
        reason = f"{format_bytes(available)} of host memory are available, of which {format_bytes(margin)} stay free"
        raise OutOfMemory(where, wanted_bytes=wanted_bytes, reason=reason)


def available_bytes(root: Path = Path("/")) -> int | None:
    """What may still be taken before the machine, or a control group around this process, has no more; None where
    nobody knows. `root` is where `/proc` and `/sys` are."""
    known = [number for number in (_machine(root), *_groups(root)) if number is not None]
    return max(0, min(known)) if known else None


def _machine(root: Path) -> int | None:
    found = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if found is None else found * 1024


def _groups(root: Path) -> Iterator[int | None]:
    """Of every control group from this process's own up to the root, in both versions of the kernel's interface."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / name.lstrip("/")
        for place in (folder, *folder.parents):
            yield _group(place)
            if place == top:
                break


def _group(folder: Path) -> int | None:
    for limit, current, cache in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        most, used = _text(folder / limit).strip(), _text(folder / current).strip()
        if most.isdecimal() and used.isdecimal():
            stat = _fields(folder / "memory.stat")
            return int(most) - int(used) + sum(stat.get(name, 0) for name in cache)
    return None


def _fields(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
