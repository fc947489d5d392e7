"""Whole pages: every layer, every role and every lane of a group at once, so that nothing can be left behind."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.cache import Copy
from kvweave.errors import BadRows, TensorError
from kvweave.plan import Plan
from kvweave.pool import NULL
from kvweave.tensor.arena import Arena

Pages = NDArray[np.int64]


def carry_out(arena: Arena, copies: Iterable[Copy]) -> None:
    """Make the copies that a cache asks for, in order. A copy that makes no sense is found before any is made."""
    wanted = [(copy.tag, *_pairs(arena.plan, copy)) for copy in copies if arena.plan.group(copy.tag).layers]
    for tag, src, dst in wanted:
        _copy(arena, arena, tag, src, dst)


def copy_pages(source: Arena, target: Arena, tag: str, src: object, dst: object) -> None:
    """Copy pages of a group from one arena to another in which a page of it looks the same: pages `src` to `dst`."""
    shapes = [arena.pages(tag).shape[1:] for arena in (source, target)]
    if shapes[0] != shapes[1]:
        raise TensorError(f"pages of {tag!r} are {tuple(shapes[0])} bytes here and {tuple(shapes[1])} there")
    src_pages, dst_pages = _checked(source.plan, tag, src), _checked(target.plan, tag, dst)
    _check_lengths(tag, src_pages, dst_pages)
    _copy(source, target, tag, src_pages, dst_pages)


def zero_pages(arena: Arena, tag: str, pages: object) -> None:
    """Wipe pages. In a shared pool a page may hold what another group left there, which kernels that load a block
    before they mask it could take for a NaN; wipe the pages that a sequence newly got where that matters."""
    memory = arena.pages(tag)
    for page in _checked(arena.plan, tag, pages).tolist():
        memory[page].zero_()


def _copy(source: Arena, target: Arena, tag: str, src: Pages, dst: Pages) -> None:
    """One page after the other, so that a page written by one copy may be read by the next."""
    here, there = (arena.pages(tag).view(torch.int64) for arena in (source, target))
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        there[b].copy_(here[a])


def _pairs(plan: Plan, copy: Copy) -> tuple[Pages, Pages]:
    src, dst = _checked(plan, copy.tag, copy.src), _checked(plan, copy.tag, copy.dst)
    _check_lengths(copy.tag, src, dst)
    return src, dst


def _check_lengths(tag: str, src: Pages, dst: Pages) -> None:
    if len(src) != len(dst):
        raise BadRows(f"{len(src)} pages of {tag!r} cannot become {len(dst)}")


def _checked(plan: Plan, tag: str, pages: object) -> Pages:
    """Pages that somebody can own: neither NULL nor beyond the pool."""
    numbers = np.asarray(pages, np.int64).ravel()
    first, past = plan.group(tag).pages_per_super, plan.num_pages(tag) + plan.group(tag).pages_per_super
    wrong = numbers[(numbers < first) | (numbers >= past)]
    if len(wrong):
        null = " (the NULL page)" if wrong[0] == NULL else ""
        raise BadRows(f"page {wrong[0]}{null} of {tag!r} is nobody's: its pages are {first} to {past - 1}")
    return numbers
