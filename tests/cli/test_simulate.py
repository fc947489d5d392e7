"""`kvweave simulate`: tables, JSON lines, CSV, a page, and errors in one line."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from kvweave.sim import TraceWriter
from tests.cli.command import Kvweave
from tests.sim import samples
from tests.sim.samples import lines, written

ASK = ("--model", "qwen3-next-80b", "--memory", "1GiB")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty conversations of three turns each, one after the other's turn."""
    rows = [
        {
            "timestamp": 1000 * (40 * turn + chat),
            "input_length": 1536 * (turn + 1) + 100,
            "output_length": 50,
            "hash_ids": [0, *range(100 * (chat + 1), 100 * (chat + 1) + 3 * (turn + 1) - 1), 10_000 + 40 * turn + chat],
        }
        for turn in range(3)
        for chat in range(40)
    ]
    return written(tmp_path, "chats.jsonl", lines(rows))


def test_the_table_says_what_was_saved_what_could_be_and_what_was_made_up(kvweave: Kvweave, trace: Path) -> None:
    run = kvweave("simulate", str(trace), *ASK, "--memory", "16GiB", "--policy", "lru", "--policy", "lfu")
    assert run.code == 0, run.err
    assert "chats.jsonl (mooncake) on qwen3-next-80b: 120 requests" in run.out
    for words in ("placement", "bound", "no point", "note: read as", "one at a time", "16 GiB would save"):
        assert words in run.out, words


def test_a_narrow_terminal_cuts_no_number(kvweave: Kvweave, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ("simulate", str(trace), *ASK, "--memory", "16GiB", "--tier", "host=64GiB@20GB/s")
    wide = {word for word in kvweave(*ask).out.split() if len(word) >= len("100,000") and word[-4:-3] == ","}
    monkeypatch.setenv("COLUMNS", "60")
    narrow = kvweave(*ask).out
    assert max(map(len, narrow.splitlines())) <= 60
    assert wide, "numbers of tokens; the speed of a replay is another one each time"
    assert wide <= {*narrow.split()}


def test_json_is_an_object_a_line_with_every_number(kvweave: Kvweave, trace: Path) -> None:
    run = kvweave("simulate", str(trace), *ASK, "--memory", "16GiB", "--tier", "host=64GiB@20GB/s", "--json")
    small, large = (json.loads(line) for line in run.out.splitlines())
    assert small["memory"] == 2**30
    assert small["hit"] < large["hit"] <= large["oracles"]["bound"] <= large["overlap"]
    assert sum(large[name] for name in ("hit", "evicted", "no_point", "never_seen")) == large["prompt"]
    assert small["tiers"][0]["loaded_tokens"] == large["hit"] + large["tiers"][0]["loaded_tokens"] - small["hit"]
    assert small["invented"]
    assert {"state", "full", "request"} <= small["occupancy"][0].keys()


def test_csv_is_a_row_a_request_policy_and_memory(kvweave: Kvweave, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "rows.csv"
    run = kvweave("simulate", str(trace), *ASK, "--policy", "lru", "--policy", "cost", "--csv", str(path), "--json")
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 240
    for line in run.out.splitlines():
        cell = json.loads(line)
        assert sum(int(row["hit_tokens"]) for row in rows if row["policy"] == cell["policy"]) == cell["hit"]


def test_the_report_is_one_page_that_needs_nothing_else(kvweave: Kvweave, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert kvweave("simulate", str(trace), *ASK, "--memory", "4GiB", "--report", str(path)).code == 0
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg") == 8, "four pictures, wide and narrow"
    assert not re.search(r'(?:src|href)="|@import|url\(', page)
    data = re.search(r'<script type="application/json" id="simulation">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert [cell["memory"] for cell in json.loads(data[1])] == [2**30, 2**32]


def test_policies_have_a_colour_each_that_no_oracle_has(kvweave: Kvweave, trace: Path, tmp_path: Path) -> None:
    path, names = tmp_path / "report.html", ("adaptive", "lru", "lfu", "cost")
    asked = [word for name in names for word in ("--policy", name)]
    assert kvweave("simulate", str(trace), *ASK, *asked, "--report", str(path)).code == 0
    drawn = path.read_text(encoding="utf-8").split("share of prompt tokens hit, by memory")[1].split("</svg>")[0]
    lines = re.findall(r'<polyline[^>]*stroke="([^"]+)"', drawn)
    assert len(lines) == len({*lines}) == len(names) + 5, "four oracles and the infinite cache"


def test_a_timeline_has_gaps_where_no_request_arrived(kvweave: Kvweave, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * at, "input_length": 600, "output_length": 1, "hash_ids": [at, 1]} for at in (0, 1, 600)
    ]
    path = tmp_path / "report.html"
    assert kvweave("simulate", str(written(tmp_path, "x.jsonl", lines(rows))), *ASK, "--report", str(path)).code == 0
    drawn = path.read_text(encoding="utf-8").split("Over time")[1].split("</svg>")[0]
    bars = {float(x) for x in re.findall(r'<rect[^>]*x="([0-9.]+)"[^>]*class="never_seen"', drawn)}
    assert len(bars) == 2
    assert max(bars) - min(bars) > 400
    assert "600 s" in drawn


def test_a_trace_of_lengths_says_why_it_cannot_be_replayed(kvweave: Kvweave, tmp_path: Path) -> None:
    path = written(tmp_path, "azure.csv", samples.AZURE)
    run = kvweave("simulate", str(path), *ASK)
    assert run.code == 2
    assert "nothing of their tokens" in run.err
    load = kvweave("simulate", str(path), "--load")
    assert "2 requests in 4 s" in load.out
    assert json.loads(kvweave("simulate", str(path), "--load", "--json").out)["prompt"][3] == 396


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give one with --model"),
        (("--model", "qwen3-next-80b", "--policy", "lru2"), "did you mean 'lru'"),
        (("--model", "qwen3-next-80b", "--tier", "host=1GB"), "must be larger"),
        (("--model", "qwen3-next-80b", "--sample", "2"), "share of the sessions"),
        (("--model", "qwen3-next-80b", "--read", "tails"), "unknown way to read"),
        (("--model", "qwen3-next-80b", "--memory", "1KB"), "bytes"),
        (("--model", "llama-3.1-8b", "--tokenizer", "/nowhere"), "nothing is at"),
        (("--model", "llama-3.1-8b", "--prefill-speed", "nan"), "must be finite and above 0"),
        (("--model", "llama-3.1-8b", "--memory", "9999TB"), "ids end at 2,147,483,647"),
    ],
)
def test_mistakes_are_one_line(kvweave: Kvweave, trace: Path, options: tuple[str, ...], says: str) -> None:
    run = kvweave("simulate", str(trace), *options)
    assert run.code == 2
    assert says in run.err
    assert run.err.count("\n") == 1


def test_a_policy_that_fails_is_named_in_one_line_and_lru_goes_on(
    kvweave: Kvweave, trace: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, "mine.py", "def broken(point):\n    raise KeyError('two\\nlines')\n")
    ask = ("simulate", str(trace), *ASK, "--memory", "2GiB", "--no-oracles", "--json")
    run = kvweave(*ask, "--policy", f"{path}:broken")
    assert run.code == 0
    assert run.err.startswith("kvweave: warning: the policy broken failed: KeyError: ")
    assert run.err.count("\n") == 1
    lru = kvweave(*ask, "--policy", "lru")
    hits, of_lru = ([json.loads(line)["hit"] for line in out.splitlines()] for out in (run.out, lru.out))
    assert hits == of_lru


def test_the_help_teaches_with_examples(kvweave: Kvweave) -> None:
    said = kvweave("simulate", "--help").out
    for words in ("Needs neither weights nor a GPU", "--tier host=256GB", "mine.py:Policy", "--load"):
        assert words in said, words


def test_a_recording_with_a_plan_needs_no_model_but_for_another_memory(kvweave: Kvweave, tmp_path: Path) -> None:
    from kvweave.plan import make_plan
    from tests.sim.plans import FULL

    path = tmp_path / "t.jsonl"
    with TraceWriter(path, plan=make_plan(FULL, "1MiB")) as writer:
        for _ in range(2):
            writer.write(range(40))
    assert json.loads(kvweave("simulate", str(path), "--json").out)["hit"] == 32
    assert json.loads(kvweave("simulate", str(path), "--every", "64", "--json").out)["hit"] == 32
    for option in (("--memory", "2MiB"), ("--tier", "host=1GiB")):
        assert "give --model to try" in kvweave("simulate", str(path), *option).err


@pytest.mark.parametrize("memory", ["1GiB", "4MB"])
def test_what_a_run_recorded_is_replayed_to_the_very_hits(kvweave: Kvweave, tmp_path: Path, memory: str) -> None:
    path = tmp_path / "run.jsonl"
    small = ("--parties", "5", "--turns", "2", "--shared-tokens", "300", "--turn-tokens", "60", "--size", "2M")
    made = kvweave("run", "qwen3-next-80b", *small, "--memory", memory, "--record", str(path), "--json").json()
    rows = tmp_path / "rows.csv"
    replayed = kvweave("simulate", str(path), "--csv", str(rows), "--json").json()
    hits = [int(row["hit_tokens"]) for row in csv.DictReader(rows.open())]
    assert hits == [request["reused_tokens"] for request in made["requests"]]
    assert replayed["hit"] == replayed["recorded_hits"] == made["reused_tokens"] > 0
    assert (replayed["evicted_bytes"] > 0) == (memory == "4MB")
    assert json.loads(path.read_text().splitlines()[0])["step_tokens"] == 2048
    assert any("a block at a time, as token by token" in told for told in replayed["assumptions"])
