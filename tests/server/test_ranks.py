"""Processes of different tensor-parallel degree share prefixes of a hybrid model through one daemon, bit for bit."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from kvweave.server import RemoteStore
from tests.server.models import SCHEMA, SPEC, spawned, store_prompt
from tests.store.models import CHUNK, Rank, fill, rank, share

CHUNKS = 4
LENGTH = CHUNK * CHUNKS


def in_a_process(work: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def ranks(degree: int, block: int, layout: str) -> list[Rank]:
    blocks = dict.fromkeys(SPEC.groups(), block)
    return [rank(SCHEMA, SPEC, LENGTH, tp=degree, at=at, block_tokens=blocks, layout=layout) for at in range(degree)]


def engine_that_writes(socket: Path, degree: int) -> None:
    for member in ranks(degree, 16, "layer_major"):
        fill(SCHEMA, member, CHUNKS)
        store = RemoteStore(SCHEMA, socket, model="hybrid")
        saved = store.save(
            store_prompt(range(LENGTH + 1)), member.pages.source(member.table), shards=member.pages.writes
        )
        assert saved.stored > 0
        assert saved.dropped == 0
        store.close()


def engine_that_reads(socket: Path, degree: int) -> None:
    for member, right in zip(ranks(degree, 64, "page_major"), ranks(degree, 64, "page_major"), strict=True):
        fill(SCHEMA, right, CHUNKS)
        store = RemoteStore(SCHEMA, socket, model="hybrid")
        hit = store.lookup(store_prompt([*range(LENGTH), 7, 8, 9]), shards=member.pages.reads)
        assert hit.position == LENGTH
        assert store.load(hit, member.pages.sink(member.table), shards=member.pages.reads) == LENGTH
        mine, theirs = share(member), share(right)
        for place, shards in mine.items():
            reach = SPEC.groups()[place[1]][0].reach
            first = LENGTH - 1 if not reach.per_token else int(reach.tail(LENGTH))
            per_row = LENGTH // len(shards)
            assert shards[first // per_row :] == theirs[place][first // per_row :], place
        store.close()


@pytest.mark.parametrize(("writes", "reads"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_what_one_degree_stored_another_reads_bit_for_bit(tmp_path: Path, writes: int, reads: int) -> None:
    socket = tmp_path / "kv.sock"
    with spawned(socket, "--memory", "8MiB"):
        in_a_process(lambda: engine_that_writes(socket, writes))
        in_a_process(lambda: engine_that_reads(socket, reads))
