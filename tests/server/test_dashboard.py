"""The dashboard, in a real browser; and the board for Grafana."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from html import escape, unescape
from pathlib import Path

import pytest

from kvweave.server import Daemon, Disk
from kvweave.server.daemon import DASHBOARD
from kvweave.server.metrics import metrics
from kvweave.server.report import ClientReport, ModelReport, PrefixReport, Report, SlowRequest, TenantReport
from kvweave.store import TierExecutorStats, TierStats
from kvweave.store.histogram import BUCKETS_S
from tests.server.models import POINTS, prompt, serving, settings, store, verify
from tests.server.test_metrics import get
from tests.store.models import truth

BOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    wish = settings(tmp_path, http="127.0.0.1:0", disk=Disk(tmp_path / "disk", 64 << 20))
    with serving(wish) as daemon:
        client = store(tmp_path / "kv.sock")
        client.client._name = HOSTILE
        client.client._hang_up()
        for number in range(3):
            client.save(prompt(number, tenant=HOSTILE), truth, points=POINTS)
            client.load(client.lookup(prompt(number, tenant=HOSTILE)), verify)
        client.lookup(prompt(9))
        yield daemon
        client.close()


def exported(daemon: Daemon) -> set[str]:
    """Names of series, as Prometheus stores them."""
    lines = metrics(daemon.report()).splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_every_metric_of_the_board_is_exported_and_no_kind_of_number_is_forgotten(daemon: Daemon) -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"kvweave_[a-z_0-9]+", expression)}
    names = exported(daemon)
    assert used <= names
    for kind in ("lookup", "load", "save"):
        assert f"kvweave_{kind}_seconds_bucket" in used
    assert {"kvweave_tier_bytes_total", "kvweave_tier_queued", "kvweave_leases", "kvweave_tier_evicted_total"} <= used
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_boards_variables_are_its_own() -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    known = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval", "__all"}
    assert {*re.findall(r"\$\{?(\w+)", json.dumps(board))} <= known


def test_the_page_is_one_file_that_asks_nobody_else(daemon: Daemon) -> None:
    assert get(daemon, "/") == (200, DASHBOARD)
    assert not re.search(r"https?://|@import|url\(|src=", DASHBOARD)
    assert f"[{', '.join(f'{bound:g}' for bound in BUCKETS_S)}]" in DASHBOARD, "the page has other buckets"
    status, report = get(daemon, "/report.json")
    assert status == 200
    assert json.loads(report)["tenants"][0]["tokens_found"] == 3 * 1024
    assert get(daemon, "/report.json", "POST")[0] == 405


def names(record: type) -> set[str]:
    return {field.name for field in fields(record)}


def test_the_page_shows_only_what_reports_have() -> None:
    assert {*re.findall(r"\breport\.(\w+)", DASHBOARD)} <= names(Report) | {"json"}
    records = {
        "tiers": TierExecutorStats, "models": ModelReport, "prefixes": PrefixReport, "clients": ClientReport,
        "tenants": TenantReport, "slowest": SlowRequest,
    }  # fmt: skip
    for call in DASHBOARD.split("table(")[1:]:
        listed = re.search(r"report\.(\w+)(?:\.slice\(0, \d+\))?\.map\(\((\w)\) =>", call)
        if listed:
            assert {*re.findall(rf"\b{listed[2]}\.(\w+)", call)} <= names(records.pop(listed[1])), listed[1]
    assert not records, "a table is gone"
    assert {*re.findall(r"\bt\.tier\.(\w+)", DASHBOARD)} <= names(TierStats)


def test_a_browser_may_run_nothing_that_came_in_by_a_name(daemon: Daemon) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.ports[0]}/", timeout=5) as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert answer.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in policy
    assert "innerHTML" not in DASHBOARD


def browse(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000", "--window-size=1280,1400"]
    return subprocess.run(
        [chromium, *flags, *options, address], capture_output=True, text=True, timeout=120, check=True
    )


@pytest.mark.slow
def test_a_browser_shows_what_the_daemon_says(daemon: Daemon) -> None:
    page = browse(f"http://127.0.0.1:{daemon.ports[0]}/", "--dump-dom").stdout
    shown = re.sub(r"<script>.*</script>|<style>.*</style>", "", page, flags=re.DOTALL)
    assert "74.9%" in shown, "three of four lookups found 1,024 of 1,025 tokens each"
    for words in ("memory", "disk", "hybrid", "lookup", "load", "save", "&lt;img src=x"):
        assert words in shown, words
    assert "did not answer" not in shown
    assert "<title>kvweave</title>" in page, "a name was run"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_light_and_dark(daemon: Daemon, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / f"{scheme}.png"
    preferred = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    browse(f"http://127.0.0.1:{daemon.ports[0]}/", f"--screenshot={picture}", preferred)
    assert picture.stat().st_size > 20_000


LOOK = """<script>
const wide = [...document.querySelectorAll("section")].filter(each => each.scrollWidth > each.clientWidth);
const page = document.documentElement.scrollWidth;
const facts = {wide: wide.map(each => each.querySelector("h2").textContent), page};
parent.document.body.textContent = "facts" + JSON.stringify(facts) + "facts";
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 900, 420])
def test_nothing_scrolls_sideways(daemon: Daemon, tmp_path: Path, width: int) -> None:
    page = browse(f"http://127.0.0.1:{daemon.ports[0]}/", "--dump-dom").stdout
    still = re.sub(r"<script>.*</script>", LOOK, page, flags=re.DOTALL)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body><iframe width="{width}" height="2000" frameborder="0" srcdoc="{escape(still)}"></iframe></body>'
    )
    found = re.search(r"facts(.*)facts", browse(frame.as_uri(), "--dump-dom").stdout, re.DOTALL)
    assert found is not None
    facts = json.loads(unescape(found[1]))
    assert facts["wide"] == []
    assert facts["page"] <= width
