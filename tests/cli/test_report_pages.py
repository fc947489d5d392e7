"""The report in a browser: nothing scrolls sideways, nothing is cut off, wide and narrow, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from kvweave.cli.report import report_html
from kvweave.cli.run import runner
from kvweave.cli.run.run_request import RunRequest
from kvweave.cli.run.workload import WorkloadSize
from tests.cli.threads import one_thread  # noqa: F401

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to look at pages with"),
]
LOOK = """<script>
const seen = [...document.querySelectorAll("svg")].filter(svg => svg.getClientRects().length);
const cut = seen.flatMap(svg => [...svg.querySelectorAll("text")].filter(text => {
  const box = text.getBBox(); return box.x < 0 || box.x + box.width > svg.viewBox.baseVal.width;
}).map(text => text.textContent));
const ink = getComputedStyle(document.body).color;
const size = Math.min(...seen.flatMap(svg => [...svg.querySelectorAll("text")].map(text =>
  parseFloat(text.getAttribute("font-size")) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)));
const facts = {scroll: document.documentElement.scrollWidth, inner: innerWidth, cut, ink, size, svgs: seen.length};
parent.document.body.textContent = "facts" + JSON.stringify(facts) + "facts";
</script>"""


@pytest.fixture(scope="module", params=["gemma-3-27b", "qwen3-next-80b", "deepseek-v4-flash"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose details are open, and which says how it looks."""
    size = WorkloadSize(parties=3, turns=2, shared_tokens=64, turn_tokens=48)
    asked = RunRequest(request.param, size=size, memory="64MiB", compare=True, max_new_tokens=4, parameters="4M")
    text = report_html(runner.run(asked, lambda _: None, print))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text.replace("<details>", "<details open>").replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
    return path


def looked_at(page: Path, width: int, scheme: str) -> dict[str, Any]:
    """What a browser says of the page in a frame of that width; its own window is never narrower than 500."""
    frame = page.with_name("frame.html")
    inside = escape(page.read_text(encoding="utf-8"))
    frame.write_text(f'<body><iframe width="{width}" height="2000" frameborder="0" srcdoc="{inside}"></iframe></body>')
    dark = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", dark, "--dump-dom")
    command = [str(CHROMIUM), *options, "--window-size=1400,2000", frame.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"facts(.*)facts", run.stdout, re.DOTALL)
    assert found is not None, run.stderr[-500:]
    facts: dict[str, Any] = json.loads(unescape(found[1]))
    return facts


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
def test_a_report_fits_its_screen_and_can_be_read(page: Path, width: int, scheme: str) -> None:
    facts = looked_at(page, width, scheme)
    assert facts["inner"] == width
    assert facts["scroll"] <= width, "it scrolls sideways"
    assert facts["cut"] == []
    assert facts["svgs"] == 5, "each picture once: wide or narrow"
    assert facts["size"] >= 9, "letters that can be read"
    assert (sum(map(int, re.findall(r"\d+", facts["ink"])[:3])) > 384) == (scheme == "dark")
