"""A simulated engine over real tensors: it signs every row that it writes, and checks every row that it may read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch

from kvweave.cache import Cache, Sequence
from kvweave.tensor import Arena, RoleView, carry_out, gather_rows, read_rows, row_slots, write_rows
from kvweave.tensor.torch_dtypes import flat_bytes
from tests.cache.engine import signatures


def sign(view: RoleView, marks: list[int]) -> torch.Tensor:
    """Rows of bytes that only this layer and role would hold after these tokens, as the role's own type."""
    if not marks:
        return read_rows(view, np.empty(0, np.int64))
    size = view.role.shape[0] if view.role.parts else view.planes[0].tensor[0, 0].numel() * view.tensor.dtype.itemsize
    own = zlib.crc32(f"{view.layer} {view.group.tag} {view.role.name}".encode()) << 32
    seeds = np.array([mark % 2**64 for mark in marks], np.uint64) ^ np.uint64(own)
    mixed = (seeds[:, None] + np.arange(size).astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    flat = (mixed >> np.uint64(40)).astype(np.uint8)
    rows = torch.from_numpy(flat)
    return rows if view.role.parts else rows.view(view.tensor.dtype).view(len(marks), *view.planes[0].shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the byte: a NaN is a NaN."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and bool((flat_bytes(one).cpu() == flat_bytes(other).cpu()).all())


class Engine:
    def __init__(self, cache: Cache, arena: Arena) -> None:
        self.cache, self.arena = cache, arena

    def views(self) -> Iterator[RoleView]:
        for group in self.cache.plan.groups:
            for layer in group.layers:
                yield from self.arena.layer(layer, group.tag).roles.values()

    def step(self, sequence: Sequence, start: int) -> None:
        """Check what the tokens [start, length) need, then write them."""
        marks = signatures(sequence.namespace, sequence.tokens[: sequence.length].tolist())
        for view in self.views():
            if view.group.cache.reach.per_token:
                self.check(view, sequence, start, marks)
                self._write(view, sequence, start, marks)
            else:
                self._step_state(view, sequence, start, marks)

    def _write(self, view: RoleView, sequence: Sequence, start: int, marks: list[int]) -> None:
        tokens = view.role.tokens_per_row
        slots = row_slots(self.cache.slots(sequence, view.group.tag, start), tokens)
        ends = [p for p in range(start, sequence.length) if (p + 1) % tokens == 0]
        write_rows(
            view, slots, sign(view, [marks[p] for p in ends]) if view.role.alias_of is None else read_rows(view, slots)
        )

    def check(self, view: RoleView, sequence: Sequence, position: int, marks: list[int]) -> None:
        """All rows needed to go on from `position` are there, through `gather_rows`."""
        reach, tokens = view.group.cache.reach, view.role.tokens_per_row
        table = self.cache.table(view.group.tag)[sequence.row]
        view = (
            view
            if view.role.alias_of is None
            else self.arena.layer(view.layer, view.group.tag).role(view.role.alias_of)
        )
        for first, last in ((0, min(reach.head, position)), (max(reach.head, int(reach.tail(position))), position)):
            numbers = range(-(-first // tokens), last // tokens)
            if numbers and first < last:
                expected = sign(view, [marks[number * tokens + tokens - 1] for number in numbers])
                assert same(gather_rows(view, table, first, last), expected), f"{view.name} holds somebody else's rows"

    def _step_state(self, view: RoleView, sequence: Sequence, start: int, marks: list[int]) -> None:
        pages = self.cache.table(view.group.tag)[sequence.row].astype(np.int64)
        if start:
            expected = sign(view, [marks[start - 1]])
            assert same(read_rows(view, pages[:1]), expected), f"{view.name}: not the state after {start} tokens"
        write_rows(view, pages[:1], sign(view, [marks[sequence.length - 1]]))
        for tag, position, page in sequence.checkpoints:
            if tag == view.group.tag:
                write_rows(view, np.array([page]), sign(view, [marks[position - 1]]))

    def run(self, sequence: Sequence, n: int, tokens: np.ndarray | None = None) -> None:
        start = sequence.length
        carry_out(self.arena, self.cache.extend(sequence, n, tokens=tokens, checkpoints=True))
        self.step(sequence, start)
        carry_out(self.arena, self.cache.commit(sequence))
