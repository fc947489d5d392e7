"""Recordings: which prefixes were equal, and nothing of their text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import BadOption, TraceError
from kvweave.plan import make_plan
from kvweave.prefix import Retention
from kvweave.sim import TraceWriter, read_trace
from kvweave.sim.foresight import Foresight
from kvweave.sim.trace import Request, Trace
from tests.sim.plans import FULL

WORDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


@given(WORDS)
def test_what_is_read_back_overlaps_as_the_tokens_did(
    tmp_path_factory: pytest.TempPathFactory, words: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    with TraceWriter(path, block_tokens=2) as writer:
        for number, word in enumerate(words):
            writer.write(word, session=f"s{number % 2}", cached=number, arrived=float(number))
    read = read_trace(path)
    asked = [Request(float(n), np.array(word, np.int32), len(word)) for n, word in enumerate(words)]
    known = Foresight(Trace("known", "", 1, tuple(asked)), 2)
    assert [placed.overlap for placed in Foresight(read, 2).requests] == [placed.overlap for placed in known.requests]
    assert [request.prompt_tokens for request in read.requests] == [len(word) for word in words]
    assert read.recorded_hits == sum(range(len(words)))
    assert read.sessions == min(2, len(words))


def test_a_recording_holds_neither_tokens_nor_names_and_two_cannot_be_compared(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        with TraceWriter(tmp_path / name) as writer:
            writer.write(range(40_000, 40_040), [40_040] * 8, session="alice", namespace="tenant")
        texts.append((tmp_path / name).read_text())
        assert not any(word in texts[-1] for word in ("4000", "alice", "tenant"))
    first, second = (json.loads(text.splitlines()[1]) for text in texts)
    assert len(first["blocks"]) == 3
    assert not {*first["blocks"]} & {*second["blocks"]}
    assert max(first["blocks"]) < 2**53


def test_equal_tokens_of_two_namespaces_have_different_ids(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        for namespace in ("one", "two", "one"):
            writer.write(range(32), namespace=namespace)
    foresight = Foresight(read_trace(tmp_path / "t.jsonl"), 16)
    assert [placed.overlap for placed in foresight.requests] == [0, 0, 1]


def test_a_recording_carries_its_plan_and_retention(tmp_path: Path) -> None:
    plan = make_plan(FULL, "1MiB")
    with TraceWriter(tmp_path / "t.jsonl", plan=plan, retention=Retention(every=64)) as writer:
        writer.write([1, 2, 3])
    read = read_trace(tmp_path / "t.jsonl")
    assert read.recorded_with["retention"]["every"] == 64
    assert type(plan).from_dict(read.recorded_with["plan"]) == plan


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"time": 0, "prompt": 40, "output": 0, "blocks": [1]}, "40 tokens has 1 blocks"),
        ({"time": 0, "prompt": 0, "output": 0, "blocks": []}, "prompt must be a number of 1"),
        ({"prompt": 4, "output": 0, "blocks": []}, "line 2 has no field 'time'"),
        ({"time": 0, "prompt": 4, "output": 0, "blocks": [], "cached": "all"}, "line 2: cached must be a number"),
    ],
)
def test_damaged_lines_are_refused(tmp_path: Path, line: dict[str, object], says: str) -> None:
    path = tmp_path / "t.jsonl"
    TraceWriter(path).close()
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(TraceError, match=says):
        read_trace(path)
    with pytest.raises(BadOption, match="at least 1 token"):
        TraceWriter(path, block_tokens=0)


def test_a_recording_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"format": "kvweave-trace", "version": 99, "block_tokens": 16}\n')
    with pytest.raises(TraceError, match="version 1"):
        read_trace(path)
    path.write_text("")
    with pytest.raises(TraceError, match="version 1"):
        read_trace(path, format="kvweave-trace")
    path.write_text('{"format": "kvweave-trace", "version": 1, "block_tokens": 1000000000000}\n')
    with pytest.raises(TraceError, match="block_tokens must be a number of 1 to 16,777,216"):
        read_trace(path)
