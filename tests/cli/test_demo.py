"""`kvweave demo`: two models with and without reuse; `--plan`: one table, one picture, and where to go on."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvweave.cli import demo
from kvweave.cli.demo_plan import MODELS
from kvweave.cli.run.workload import WorkloadSize
from tests.cli.command import Kvweave
from tests.cli.threads import one_thread  # noqa: F401

SMALL = (
    demo.DemoModel("gemma-3-27b", "1M", "32MiB", "windows"),
    demo.DemoModel("qwen3-next-80b", "1M", "64MiB", "states"),
)


def test_the_demo_ends_with_a_line_a_model_and_its_reports(
    kvweave: Kvweave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "MODELS", SMALL)
    monkeypatch.setattr(demo, "WORKLOAD", WorkloadSize(parties=2, turns=2, shared_tokens=256, turn_tokens=32))
    monkeypatch.setattr(demo, "AT_ONCE", WorkloadSize(parties=4, turns=1, shared_tokens=128, turn_tokens=32))
    run = kvweave("demo")
    assert run.code == 0, run.err
    rows = [line.split() for line in run.out.splitlines() if " scaled to " in line and line.endswith("yes")]
    assert [row[0] for row in rows] == ["gemma-3-27b", "qwen3-next-80b"] * 3
    assert all("%)" in "".join(row) for row in rows[:2])
    assert all(row[4] == "4" and int(row[5].rstrip("%")) > 30 for row in rows[2:4]), "at once, and yet reused"
    assert [row[4:6] for row in rows[4:]] == [["288", "256"]] * 2, "a new process found it on disk"
    for model in SMALL:
        path = tmp_path / "kvweave-demo" / f"{model.example}.html"
        assert f"Report: {path.resolve()}" in run.out
        assert path.read_text().startswith("<!doctype html>")
        assert ElementTree.parse(path.with_suffix(".svg")).getroot().tag.endswith("svg")


@pytest.fixture
def out(kvweave: Kvweave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    run = kvweave("demo", "--plan")
    assert run.code == 0
    return run.out


def test_the_planning_demo_compares_every_model_with_one_page_size(out: str) -> None:
    rows = {words[0]: words for line in out.splitlines() if (words := line.split()) and words[0] in MODELS}
    assert set(rows) == set(MODELS)
    assert " ".join(rows["qwen3-next-80b"][5:]) == "24,576 73.69 MiB 97 / 94 0.02% / 0.06% 16 / 1,056"
    assert " ".join(rows["deepseek-v4-flash"][-6:]) == "2.15% / 45.43% 128 / 4,096"


def test_the_planning_demo_says_where_it_drew_a_picture(out: str, tmp_path: Path) -> None:
    path = tmp_path / "kvweave-demo" / "kvweave-plan-qwen3-next-80b.svg"
    assert str(path.resolve()) in out
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "kvweave plan qwen3-next-80b --explain" in out


def test_the_planning_demo_may_be_run_again(out: str, kvweave: Kvweave) -> None:
    assert kvweave("demo", "--plan").out == out


def test_a_folder_that_cannot_be_made_is_one_line(
    kvweave: Kvweave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvweave-demo").write_text("a file")
    monkeypatch.chdir(tmp_path)
    run = kvweave("demo", "--plan")
    assert (run.code, run.err) == (2, "kvweave: error: cannot open kvweave-demo: File exists\n")
