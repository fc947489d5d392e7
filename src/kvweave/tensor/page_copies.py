"""Copies of whole pages: all layers, roles and lanes of a group together, so that no part of a page is left out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.cache import Copy
from kvweave.errors import BadRows, TensorError
from kvweave.plan import Plan
from kvweave.pool import NULL
from kvweave.tensor.arena import Arena
from kvweave.tensor.upload import upload

Pages = NDArray[np.int64]
SLAB_BYTES = 64 << 20
"""Bytes packed at once: the temporary memory that a copy of many pages takes."""


def carry_out(arena: Arena, copies: Iterable[Copy]) -> None:
    """Make the copies that a cache returned, in order. An invalid copy is an error before any copy is made."""
    wanted = [(copy.tag, *_pairs(arena.plan, copy)) for copy in copies if arena.plan.group(copy.tag).layers]
    for tag, some in groupby(wanted, key=itemgetter(0)):
        _, src, dst = (list(column) for column in zip(*some, strict=True))
        _copy(arena, arena, tag, np.concatenate(src), np.concatenate(dst))


def copy_pages(source: Arena, target: Arena, tag: str, src: object, dst: object) -> None:
    """Copy pages `src` of a group in one arena to pages `dst` of another, in which pages of the group have the same
    layout."""
    shapes = [arena.pages(tag).shape[1:] for arena in (source, target)]
    if shapes[0] != shapes[1]:
        raise TensorError(f"pages of {tag!r} are {tuple(shapes[0])} bytes here and {tuple(shapes[1])} there")
    src_pages, dst_pages = _checked(source.plan, tag, src), _checked(target.plan, tag, dst)
    _check_lengths(tag, src_pages, dst_pages)
    _copy(source, target, tag, src_pages, dst_pages)


def zero_pages(arena: Arena, tag: str, pages: object) -> None:
    """Zero pages. In a shared pool a new page may hold bytes of another group, which a kernel that loads a block before
    it masks it could read as NaN; where that matters, zero the pages that a sequence was just given."""
    memory = arena.pages(tag)
    memory.index_fill_(0, upload(_checked(arena.plan, tag, pages), memory.device), 0)


def _copy(source: Arena, target: Arena, tag: str, src: Pages, dst: Pages) -> None:
    """As if pages were copied one after the other, so that a copy may read a page that an earlier one wrote."""
    here, there = (arena.pages(tag).view(torch.int64) for arena in (source, target))
    for first, last in pairwise(_bounds(src, dst, source is target)):
        _copy_at_once(here, there, src[first:last], dst[first:last])
    if here.device != there.device:
        torch.cuda.synchronize(here.device if here.is_cuda else there.device)


def _bounds(src: Pages, dst: Pages, is_same: bool) -> list[int]:
    """Where to split copies into batches, so that within one no page is written twice, or read after it was written."""
    if len(np.unique(dst)) == len(dst) and not (is_same and np.isin(src, dst).any()):
        return [0, len(dst)]
    bounds, written = [0], set[int]()
    for number, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        if b in written or (is_same and a in written):
            bounds.append(number)
            written.clear()
        written.add(b)
    return [*bounds, len(dst)]


def _copy_at_once(here: torch.Tensor, there: torch.Tensor, src: Pages, dst: Pages) -> None:
    """Copies that may be made in any order: on one GPU they are gathered and scattered by kernels, `SLAB_BYTES` at a
    time; between devices one transfer takes each such slab; on a CPU, and where a page is one run of bytes, page by
    page, which is as fast."""
    across, one_run = here.device != there.device, here.shape[1] == 1
    if not (here.is_cuda or there.is_cuda) or (across and one_run):
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            there[b].copy_(here[a], non_blocking=True)
        return
    count = max(1, SLAB_BYTES // (here[0].numel() * here.element_size()))
    for first in range(0, len(src), count):
        packed = _packed(here, src[first : first + count]).to(there.device)
        _unpack(there, dst[first : first + count], packed)


def _packed(memory: torch.Tensor, pages: Pages) -> torch.Tensor:
    if memory.is_cuda:
        return memory.index_select(0, upload(pages, memory.device))
    packed = torch.empty((len(pages), *memory.shape[1:]), dtype=memory.dtype, pin_memory=torch.cuda.is_available())
    for place, page in enumerate(pages.tolist()):
        packed[place].copy_(memory[page])
    return packed


def _unpack(memory: torch.Tensor, pages: Pages, packed: torch.Tensor) -> None:
    if memory.is_cuda:
        memory.index_copy_(0, upload(pages, memory.device), packed)
        return
    for place, page in enumerate(pages.tolist()):
        memory[page].copy_(packed[place])


def _pairs(plan: Plan, copy: Copy) -> tuple[Pages, Pages]:
    src, dst = _checked(plan, copy.tag, copy.src), _checked(plan, copy.tag, copy.dst)
    _check_lengths(copy.tag, src, dst)
    return src, dst


def _check_lengths(tag: str, src: Pages, dst: Pages) -> None:
    if len(src) != len(dst):
        raise BadRows(f"{len(src)} pages of {tag!r} cannot become {len(dst)}")


def _checked(plan: Plan, tag: str, pages: object) -> Pages:
    """Page ids checked to be neither NULL nor beyond the pool."""
    numbers = np.asarray(pages, np.int64).ravel()
    first, past = plan.group(tag).pages_per_superpage, plan.num_pages(tag) + plan.group(tag).pages_per_superpage
    wrong = numbers[(numbers < first) | (numbers >= past)]
    if len(wrong):
        null = " (the NULL page)" if wrong[0] == NULL else ""
        raise BadRows(f"page {wrong[0]}{null} of {tag!r} is out of range: its pages are {first} to {past - 1}")
    return numbers
