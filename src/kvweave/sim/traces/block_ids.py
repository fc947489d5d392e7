"""Traces whose prompts are ids of blocks: what both ways of reading them make of tails and outputs.

"blocks"   whole blocks of the prompt, and one token of its own in place of its tail: there is always one to compute.
           No output.
"cont"     prompts at their length, and outputs. Where another request goes on from one, the tail and the output of
           the earlier one are what the later one has there:

    earlier  |####|####|##            |   prompt, 2 whole blocks and a tail, and an output without ids
    later    |####|####|~~~~|~~~~|%%%%|   the tail and the output of the earlier one are the start of ~

           Where none does, the tail has the last id of the prompt, and the output ids of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.errors import TraceError, UnknownName
from kvweave.sim.trace import Request, TokenIds, Trace, make_trace

WAYS = ("cont", "blocks")


class Numbering:
    """Small numbers for ids of any kind, and new ones for what is made up."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._count = 0

    def __call__(self, scope: Hashable, ids: Iterable[Hashable]) -> TokenIds:
        return np.array([self._number((scope, id)) for id in ids], np.int32)

    def _number(self, key: Hashable) -> int:
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = self._count
            self._count += 1
        return number

    def new(self, count: int) -> TokenIds:
        self._count += count
        return np.arange(self._count - count, self._count, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class BlockRequest:
    """A request as such a trace has it. `parent` is the number of the request that it goes on from, where known."""

    arrival: float
    ids: TokenIds
    prompt_tokens: int
    output_tokens: int
    session: str
    namespace: str = ""
    parent: int | None = None


def checked_ids(where: str, ids: TokenIds, prompt_tokens: int, block_tokens: int) -> TokenIds:
    """The ids of a request, which must be enough for the whole blocks of its prompt."""
    whole = prompt_tokens // block_tokens
    if len(ids) < whole:
        raise TraceError(
            f"{where}: a prompt of {prompt_tokens:,} tokens has {whole:,} whole blocks of {block_tokens}, and hash_ids"
            f" names {len(ids):,}: write an id for every block, or the tokens that the ids stand for"
        )
    return ids


def read_way(
    name: str,
    format: str,
    block_tokens: int,
    rows: Sequence[BlockRequest],
    numbering: Numbering,
    way: str,
    invented: Sequence[str],
) -> Trace:
    """The trace of `rows`, which are in the order of arrival, read in one of the `WAYS`."""
    if way not in WAYS:
        raise UnknownName("way to read a trace of block ids", way, WAYS)
    if way == "blocks":
        return _whole(name, format, block_tokens, rows, numbering, invented)
    blocks, num_linked = _with_outputs(rows, block_tokens, numbering)
    requests = [
        Request(row.arrival, ids, row.prompt_tokens, row.output_tokens, row.session, row.namespace)
        for row, ids in zip(rows, blocks, strict=True)
    ]
    notes = [
        f'read as "cont": ends of prompts and outputs, which have no ids, are known for {num_linked:,} requests that a'
        f" later one continues; those of {len(rows) - num_linked:,} others are tokens that no request shares",
        *invented,
    ]
    return make_trace(name, format, block_tokens, requests, notes)


def _whole(
    name: str,
    format: str,
    block_tokens: int,
    rows: Sequence[BlockRequest],
    numbering: Numbering,
    invented: Sequence[str],
) -> Trace:
    requests = []
    for row in rows:
        count = min(row.prompt_tokens // block_tokens, len(row.ids))
        if count:
            ids = np.concatenate([row.ids[:count], numbering.new(1)])
            requests.append(Request(row.arrival, ids, count * block_tokens + 1, 0, row.session, row.namespace))
    if not requests:
        raise TraceError(f'{name}: no prompt has a whole block of {block_tokens} tokens; read it as "cont"')
    note = (
        f'read as "blocks": whole blocks of prompts, and a token of its own each; tails and outputs are left out, and'
        f" {len(rows) - len(requests):,} requests shorter than a block"
    )
    return make_trace(name, format, block_tokens, requests, [note, *invented])


def _with_outputs(rows: Sequence[BlockRequest], block_tokens: int, numbering: Numbering) -> tuple[list[TokenIds], int]:
    """The blocks of prompt and output of each request; and how many were known from one that goes on from it."""
    child: dict[int, int] = {}
    for number, row in enumerate(rows):
        if row.parent is not None and row.parent < number:
            child.setdefault(row.parent, number)
    found: list[TokenIds] = [row.ids for row in rows]
    linked = 0
    for number in reversed(range(len(rows))):  # the later one first: its own output may be part of the earlier one's
        row = rows[number]
        whole, needed = row.prompt_tokens // block_tokens, -(-(row.prompt_tokens + row.output_tokens) // block_tokens)
        ids = row.ids[: -(-row.prompt_tokens // block_tokens)]
        after = found[child[number]] if number in child else None
        if after is not None and np.array_equal(after[:whole], ids[:whole]) and len(after) > whole:
            ids = after[:needed]
            linked += 1
        found[number] = np.concatenate([ids, numbering.new(max(0, needed - len(ids)))])
    return found, linked


def guess_parents(rows: Sequence[BlockRequest], block_tokens: int) -> list[int | None]:
    """Which earlier request each one goes on from, where ids name a block and all before it.

    That whose prompt it starts with, whole blocks of it, and is longer than prompt and output of; the last block was
    new with the earlier request (a block that was there before is a shared document, not a conversation), and no other
    request goes on from it already.
    """
    ends: dict[int, int] = {}
    seen: set[int] = set()
    parents: list[int | None] = []
    for number, row in enumerate(rows):
        parent = None
        for id in reversed(row.ids.tolist()):
            earlier = ends.get(id)
            if earlier is not None and row.prompt_tokens >= rows[earlier].prompt_tokens + rows[earlier].output_tokens:
                parent = earlier
                del ends[id]
                break
        parents.append(parent)
        whole = row.prompt_tokens // block_tokens
        if whole and (last := int(row.ids[whole - 1])) not in seen:
            ends[last] = number
        seen.update(row.ids.tolist())
    return parents


def guess_sessions(rows: Sequence[TokenIds]) -> list[str]:
    """A name for the session of each request: its first block that fewer than a tenth of all requests have."""
    counts: dict[int, int] = {}
    for ids in rows:
        for id in set(ids.tolist()):
            counts[id] = counts.get(id, 0) + 1
    most = max(1, len(rows) // 10)
    return [
        str(next((id for id in ids.tolist() if counts[id] <= most), f"request {number}"))
        for number, ids in enumerate(rows)
    ]
