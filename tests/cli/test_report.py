"""The report: one page that needs nothing else, whose numbers and pictures are those of the run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvweave.cache.contents import CacheContents, Owner
from kvweave.cli.report import report_html, run_svg
from kvweave.cli.run import runner
from kvweave.cli.run.format_outcomes import format_total
from kvweave.cli.run.outcome import BaselineOutcome, RunOutcomes
from kvweave.cli.run.run_request import RunRequest, RunResult
from kvweave.cli.run.workload import WorkloadSize
from kvweave.cli.svg.draw import NARROW, WIDE, Sheet
from tests.cli.command import Kvweave
from tests.cli.threads import one_thread  # noqa: F401

VOID = {"meta", "br", "hr", "img"}
SVG = "{http://www.w3.org/2000/svg}"
SIZE = WorkloadSize(parties=3, turns=2, shared_tokens=64, turn_tokens=48)


@pytest.fixture(scope="module", params=["gemma-3-27b", "qwen3-next-80b"])
def result(request: pytest.FixtureRequest) -> RunResult:
    asked = RunRequest(request.param, size=SIZE, memory="32MiB", compare=True, max_new_tokens=4, parameters="4M")
    return runner.run(asked, lambda _: None, print)


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @classmethod
    def wide(cls, text: str) -> Page:
        """The page as a wide screen shows it: each picture once."""
        return cls(re.sub(r'<svg class="narrow".*?</svg>', "", text, flags=re.DOTALL))

    def all(self, kind: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.seen if attributes.get("class") == kind]


def numbers(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_is_well_formed_and_needs_nothing_else(result: RunResult) -> None:
    text = report_html(result)
    page = Page(text)
    assert "http" not in text
    assert "url(" not in text
    assert {tag for tag, _ in page.seen} & {"link", "img", "iframe", "object"} == set()
    assert [attributes for tag, attributes in page.seen if tag == "script"] == [
        {"type": "application/json", "id": "run"}
    ]
    assert not any(name in ("src", "href") for _, attributes in page.seen for name in attributes)
    assert "prefers-color-scheme: dark" in text


def test_its_numbers_are_the_records(result: RunResult) -> None:
    text = report_html(result)
    assert numbers(text) == json.loads(json.dumps(result.to_dict()))
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    rows = {row[0]: row for row in cells if row and row[0].startswith("agent")}
    assert len(rows) == SIZE.requests
    for outcome in result.outcomes.each:
        tokens = (outcome.prompt_tokens, outcome.reused_tokens, outcome.computed_tokens, outcome.new_tokens)
        assert rows[outcome.who][1:5] == [str(number) for number in tokens]
        assert rows[outcome.who][5] == f"{outcome.first_token_seconds:.4f}"
    assert f"{result.outcomes.reused_share:.1%}" in text
    assert "all equal" in text


def test_bars_are_to_scale(result: RunResult) -> None:
    page = Page.wide(report_html(result))
    reused, computed = ([float(bar["width"] or 0) for bar in page.all(kind)] for kind in ("reused", "computed"))
    whole = [one + other for one, other in zip(reused, computed, strict=True)]
    for outcome, bar, total in zip(result.outcomes.each, reused, whole, strict=True):
        assert bar / total == pytest.approx(outcome.reused_tokens / outcome.prompt_tokens, abs=1e-3)
    ours, plain = ([float(bar["width"] or 0) for bar in page.all(kind)] for kind in ("ours", "plain"))
    for outcome, one, other in zip(result.outcomes.each, ours, plain, strict=True):
        if one > 1 and outcome.faster is not None:
            assert other / one == pytest.approx(outcome.faster, rel=1e-2)


def test_the_map_shows_every_page_that_the_books_have(result: RunResult) -> None:
    snapshot = result.snapshot
    for group in snapshot.stats.groups:
        mine = [page for pool in snapshot.pools for s in pool.superpages if s.tag == group.tag for page in s.pages]
        assert sum(page in (Owner.CACHED, Owner.SHARED) for page in mine) == group.cached > 0
        assert mine.count(Owner.HELD) == group.held == 0
        assert mine.count(Owner.FREE) == group.free
    for pool, stats in zip(snapshot.pools, snapshot.stats.pools, strict=True):
        assert len(pool.superpages) == stats.superpages
        assert sum(s.tag is None for s in pool.superpages) == stats.free_superpages
    drawn = [int(path["data-pages"] or 0) for path in Page.wide(report_html(result)).all("pages")]
    pages = sum(group.cached + group.free for group in snapshot.stats.groups)
    assert sum(drawn) == pages + sum(pool.free_superpages for pool in snapshot.stats.pools)


def test_the_tree_begins_with_what_all_share(result: RunResult) -> None:
    tree = result.snapshot.tree
    (first, *_) = [branch for branch in tree if branch.parent is None]
    assert first.start == 0
    assert first.branches == sum(branch.branches for branch in tree if branch.parent is None) == SIZE.parties
    found = sum(outcome.reused_tokens > 0 for outcome in result.outcomes.each)
    assert sum(branch.found for branch in tree if branch.parent is None) == found
    text = report_html(result)
    assert len(Page.wide(text).all("run")) == len(tree)
    assert text.count('<td data-head="times found">') == len(tree), "and once more for those who have no pointer"


def test_the_picture_is_an_svg_within_its_frame(result: RunResult) -> None:
    root = ElementTree.fromstring(run_svg(result))
    assert root.tag == f"{SVG}svg"
    assert all(is_on(WIDE, rect) for rect in root.iter(f"{SVG}rect"))


@pytest.mark.parametrize("sheet", [WIDE, NARROW])
def test_bars_stay_on_their_sheet_wide_or_narrow(result: RunResult, sheet: Sheet) -> None:
    kind = "narrow" if sheet.is_narrow else "wide"
    pictures = re.findall(rf'<svg class="{kind}".*?</svg>', report_html(result), flags=re.DOTALL)
    assert len(pictures) == 5
    assert all(is_on(sheet, rect) for picture in pictures for rect in ElementTree.fromstring(picture).iter("rect"))


def is_on(sheet: Sheet, rect: ElementTree.Element) -> bool:
    start, width = (float(rect.attrib[name]) for name in ("x", "width"))
    return 0 <= start <= start + width <= sheet.width + 0.01


@pytest.mark.parametrize(
    ("scale", "first", "total", "kind"),
    [
        (2.0, "2.0x</b><span>faster until the first", "saved until the last", "good"),
        (0.5, "2.0x</b><span>slower until the first", "lost until the last", "bad"),
        (1.0, "1.0x</b><span>as fast until the first", "saved until the last", ""),
    ],
)
def test_slower_is_called_slower_and_is_not_green(
    result: RunResult, scale: float, first: str, total: str, kind: str
) -> None:
    """Against itself, `scale` times as long."""
    outcomes = [
        replace(o, plain=BaselineOutcome(o.first_token_seconds * scale, o.seconds * scale, None, 0.0))
        for o in result.outcomes.each
    ]
    text = report_html(replace(result, outcomes=RunOutcomes.of(outcomes)))
    assert f'<div class="tile {kind}"><b>{first}' in text
    assert total in text
    assert "<b>-" not in text
    assert " -" not in "".join(format_total(RunOutcomes.of(outcomes)))


def test_a_run_without_comparison_has_no_other_times(result: RunResult) -> None:
    alone = tuple(replace(outcome, plain=None) for outcome in result.outcomes.each)
    text = report_html(replace(result, outcomes=RunOutcomes(alone)))
    page = Page(text)
    assert not page.all("plain")
    assert "with and without reuse" not in text
    assert numbers(text)["all_tokens_equal"] is None


def test_a_difference_is_shown_first(result: RunResult) -> None:
    first, *others = result.outcomes.each
    assert first.plain is not None
    wrong = replace(first, plain=replace(first.plain, differs_at=2))
    text = report_html(replace(result, outcomes=RunOutcomes((wrong, *others))))
    assert '<div class="tile bad"><b>1 differ</b>' in text


def test_names_are_escaped(result: RunResult) -> None:
    text = report_html(replace(result, name="<script>alert(1)</script>", about=("</script><b>",)))
    Page(text)
    assert "<script>alert" not in text
    assert "</script><b>" not in text


def test_hundreds_of_requests_and_of_super_pages_are_drawn_small(result: RunResult) -> None:
    many = RunOutcomes(result.outcomes.each * 50)
    pool = result.snapshot.pools[0]
    crowd = replace(pool, superpages=pool.superpages * 800)
    snapshot = CacheContents((crowd,), result.snapshot.tree, result.snapshot.stats)
    text = report_html(replace(result, outcomes=many, snapshot=snapshot))
    Page(text)
    assert "more are not drawn" in text


def test_a_page_held_by_a_running_sequence_is_held() -> None:
    import kvweave as kw

    plan = kw.make_plan(kw.from_config(str(Path(kw.__file__).parent / "examples" / "qwen3-next-80b.json")), "4GiB")
    core = kw.Cache(plan)
    core.extend(core.open(range(40)), 40)
    snapshot = core.contents()
    held = {group.tag: group.held for group in snapshot.stats.groups}
    seen = {tag: sum(s.count(Owner.HELD) for s in snapshot.pools[0].superpages if s.tag == tag) for tag in held}
    assert seen == held
    assert held["full"] == 3


def test_the_command_writes_it_where_it_is_told(kvweave: Kvweave, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    argv = ("run", "gemma-3-27b", "--size", "4M", "--memory", "16MiB", "--prompt", "hello", "--max-new-tokens", "2")
    run = kvweave(*argv, "--report", str(path))
    assert (run.code, run.err) == (0, f"wrote {path}\n")
    Page(path.read_text(encoding="utf-8"))
