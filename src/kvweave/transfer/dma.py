"""Copies by the device's copy engines: plain, strided, and many at once.

The driver's own calls, with addresses:

torch has no strided copy between host and device (it packs on the host first), and a call of it costs several times
what the driver's costs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from kvweave.transfer.copies import Numbers
from kvweave.transfer.driver import check, cuda, is_recording

Ready: TypeAlias = Callable[[int], None]
"""A copy that is issued by calling it with a stream."""
UNIFIED = 4
"""Memory type of addresses that say by themselves whose they are."""


class _Copy2D(ctypes.Structure):
    _fields_ = [
        *((f"src_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("src_type", ctypes.c_uint),
        *((f"src_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("src_pitch", ctypes.c_size_t),
        *((f"dst_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("dst_type", ctypes.c_uint),
        *((f"dst_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_uint),
        *((f"{end}_{field}", ctypes.c_int) for end in ("src", "dst") for field in ("kind", "id")),
        ("flags", ctypes.c_uint),
    ]


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """One run of bytes. Does not block where the host's memory is pinned."""
    check(cuda().cuMemcpyAsync(target, source, num_bytes, stream))


def copy_rows(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
) -> None:
    """`height` rows of `width` bytes, so many bytes apart."""
    wanted = _Copy2D(
        src_type=UNIFIED,
        src_device=source,
        src_pitch=source_pitch,
        dst_type=UNIFIED,
        dst_device=target,
        dst_pitch=target_pitch,
        width=width,
        height=height,
    )
    check(cuda().cuMemcpy2DAsync_v2(ctypes.byref(wanted), stream))


def many(targets: Numbers, sources: Numbers, num_bytes: int) -> Ready:
    """Many runs of the same length, in any order: one call, with drivers of CUDA 13 and on, outside of graphs."""
    arrays = [np.ascontiguousarray(targets), np.ascontiguousarray(sources), np.full(len(targets), num_bytes)]
    return partial(_copy_many, arrays)


def _copy_many(arrays: list[Numbers], stream: int) -> None:
    if not hasattr(cuda(), "cuMemcpyBatchAsync_v2") or is_recording(stream):
        for target, source, num_bytes in zip(*(array.tolist() for array in arrays), strict=True):
            copy(target, source, num_bytes, stream)
        return
    targets, sources, sizes = (array.ctypes.data for array in arrays)
    first, attributes = ctypes.c_size_t(0), _Attributes(source_order=1)
    ends = ctypes.addressof(attributes), ctypes.addressof(first)
    check(cuda().cuMemcpyBatchAsync_v2(targets, sources, sizes, len(arrays[0]), *ends, 1, stream))
