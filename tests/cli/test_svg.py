"""The picture: well-formed, within its frame, and true to the plan's bytes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvweave.cli.option_syntax import PerTag, PoolOption
from kvweave.cli.plan_request import PlanRequest, PlanResult, answer
from kvweave.cli.read_config import example_names
from kvweave.cli.svg import plan_svg
from kvweave.cli.svg.draw import NULL, hues
from kvweave.cli.svg.sample_load import SampleLoad
from kvweave.plan import Parallel
from tests.cli.command import Kvweave

SVG = "{http://www.w3.org/2000/svg}"
BAR_WIDTH = 770

ODD = {
    "kernel blocks": PlanRequest("deepseek-v3.2", dtype="fp8", block_tokens=PerTag(256, {})),
    "lanes and kernel blocks": PlanRequest(
        "gemma-3-27b", layout="layer_major", block_tokens=PerTag(64, {}), kernel_tokens=PerTag(16, {})
    ),
    "pools of their own": PlanRequest(
        "gemma-3-27b", own_pools=(PoolOption.parse("window=20%"), PoolOption.parse("full=9000@host")), reserve="1GiB"
    ),
    "hardly any memory": PlanRequest("inkling", memory="1.5GiB"),
    "one stage of many": PlanRequest("qwen3-next-80b", parallel=Parallel(pp=48, pp_rank=3)),
    "a long name": PlanRequest("llama-3.1-8b", draft="deepseek-v3-nextn", draft_own_groups=True),
}
CASES = [(name, PlanRequest(name)) for name in example_names()] + list(ODD.items())


def drawn(request: PlanRequest) -> tuple[PlanResult, ElementTree.Element]:
    found = answer(request)
    return found, ElementTree.fromstring(plan_svg(found))


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


cases = pytest.mark.parametrize("request_", [case for _, case in CASES], ids=[name for name, _ in CASES])


@cases
def test_the_pages_and_paddings_of_a_super_page_add_up_to_it(request_: PlanRequest) -> None:
    found, root = drawn(request_)
    rows = {row.attrib["data-tag"]: row for row in root.iter(f"{SVG}g") if row.get("class") == "super-page"}
    assert set(rows) == {group.tag for group in found.plan.groups if group.layers}
    for tag, row in rows.items():
        pool = found.plan.pool(found.plan.group(tag).pool)
        pieces = [rect for rect in row.iter(f"{SVG}rect") if rect.get("class") in ("page", "padding")]
        assert sum(int(piece.attrib["data-bytes"]) for piece in pieces) == int(row.attrib["data-bytes"])
        assert int(row.attrib["data-bytes"]) == pool.superpage_bytes
        assert sum(number(piece, "width") for piece in pieces) == pytest.approx(BAR_WIDTH, abs=0.05)
        padding = sum(int(piece.attrib["data-bytes"]) for piece in pieces if piece.get("class") == "padding")
        pages = found.plan.group(tag).pages_per_superpage
        assert padding * pool.lanes == found.plan.padding_bytes(tag) * pages


@cases
def test_pieces_of_a_super_page_follow_one_another(request_: PlanRequest) -> None:
    _, root = drawn(request_)
    for row in (row for row in root.iter(f"{SVG}g") if row.get("class") == "super-page"):
        pieces = [rect for rect in row.iter(f"{SVG}rect") if rect.get("class") in ("page", "padding")]
        ends = [number(piece, "x") + number(piece, "width") for piece in pieces]
        starts = [number(piece, "x") for piece in pieces]
        assert starts[1:] == pytest.approx(ends[:-1], abs=0.05)


@cases
def test_everything_is_drawn_within_the_frame(request_: PlanRequest) -> None:
    _, root = drawn(request_)
    width, height = number(root, "width"), number(root, "height")
    assert width == 1200
    assert 400 < height < 4000
    for rect in root.iter(f"{SVG}rect"):
        assert number(rect, "x") >= 0
        assert number(rect, "x") + number(rect, "width") <= width + 0.01
    for words in root.iter(f"{SVG}text"):
        length = 0.62 * number(words, "font-size") * len("".join(words.itertext()))
        left = number(words, "x") - {"start": 0, "middle": length / 2, "end": length}[words.get("text-anchor", "start")]
        assert left >= 0, "".join(words.itertext())
        assert left + length <= width, "".join(words.itertext())


def test_padding_is_drawn_behind_each_page_or_at_the_end_where_it_is_too_thin() -> None:
    counts = {}
    for name, tag in (("gemma-3-27b", "window"), ("deepseek-v4-flash", "hca_state")):
        _, root = drawn(PlanRequest(name))
        row = next(row for row in root.iter(f"{SVG}g") if row.get("data-tag") == tag)
        counts[tag] = [rect.get("class") for rect in row.iter(f"{SVG}rect")].count("padding")
    assert counts == {"window": 4, "hca_state": 1}


def test_every_group_that_holds_anything_has_a_super_page_in_the_strip() -> None:
    found, root = drawn(PlanRequest("deepseek-v4-flash"))
    cells = [rect for rect in root.iter(f"{SVG}rect") if rect.findtext(f"{SVG}title", "").startswith("super-page ")]
    assert len(cells) == 13
    assert {cell.attrib["fill"] for cell in cells} >= set(hues([group.tag for group in found.plan.groups]).values())
    assert [cell.attrib["fill"] for cell in cells].count(NULL) == 1


def test_a_load_is_of_shorter_sequences_where_long_ones_do_not_fit() -> None:
    plan = answer(ODD["hardly any memory"]).plan
    load = SampleLoad.of(plan, 32_768)
    assert (load.sequences, plan.sequences(2 * load.num_tokens)) == (1, 0)
    assert SampleLoad.of(plan, load.num_tokens) == load


def test_the_memory_bar_shows_what_the_load_takes() -> None:
    found, root = drawn(PlanRequest("qwen3-next-80b"))
    taken = [int(rect.attrib["data-bytes"]) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "memory"]
    pool = found.plan.pools[0]
    supers = [1, 97, -(-97 * 2048 // 197)]
    assert taken == [pool.num_bytes, *(number * pool.unit_bytes for number in supers)]
    assert "filled as 97 sequences of 32,768 tokens would fill it" in "".join(root.itertext())


def test_a_page_is_drawn_down_to_its_roles() -> None:
    found, root = drawn(PlanRequest("gemma-3-27b"))
    sizes = [int(rect.attrib["data-bytes"]) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "role"]
    whole = sum(group.payload_bytes for group in found.plan.groups)
    zoomed = sum(group.payload_bytes // len(group.layers) for group in found.plan.groups)
    assert sum(sizes) == whole + zoomed
    said = "".join(root.itertext())
    assert "key: 16 x 16 rows x 128 bf16, 64 KiB" in said
    assert "52 layers: 0, 1, 2, 3, ..., 61" in said


def test_a_model_may_be_called_anything(tmp_path: Path, kvweave: Kvweave) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "<a&b>\\"", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}'
    )
    run = kvweave("plan", str(tmp_path), "--svg", str(tmp_path / "memory.svg"))
    assert run.err == f"wrote {tmp_path / 'memory.svg'}\n"
    root = ElementTree.parse(tmp_path / "memory.svg").getroot()
    assert '<a&b>": 1 layer' in "".join(root.itertext())


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    text = plan_svg(answer(PlanRequest("deepseek-v4-flash"))).replace('xmlns="http://www.w3.org/2000/svg"', "")
    for word in ("http", "href", "<script", "@import", "url("):
        assert word not in text


def test_kernel_blocks_too_fine_to_be_seen_are_drawn_as_one(kvweave: Kvweave, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    fine = ("--block-tokens", "1048576", "--kernel-tokens", "1", "--memory", "200TB")
    assert kvweave("plan", "llama-3.1-8b", *fine, "--svg", str(path)).code == 0
    assert path.stat().st_size < 10**6
