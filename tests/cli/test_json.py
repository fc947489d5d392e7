"""`kvweave plan --json`: the numbers, and that they agree with each other and with the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvweave import Plan, from_config, make_plan
from kvweave.cli.read_config import example_names, read_config
from tests.cli.command import Kvweave

EXPECTED = json.loads((Path(__file__).parent.parent / "data" / "examples_expected.json").read_text())
GIB = 1024**3


def group(report: dict[str, Any], tag: str) -> dict[str, Any]:
    found: dict[str, Any] = next(group for group in report["groups"] if group["tag"] == tag)
    return found


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_numbers_of_an_example_are_those_worked_out_by_hand(kvweave: Kvweave, name: str) -> None:
    report = kvweave("plan", name, "--json").json()
    assert report["num_layers"] == EXPECTED[name]["num_layers"]
    fields = ("bytes_per_token", "window_bytes_per_sequence", "state_bytes_per_sequence")
    assert {field: report[field] for field in fields} == {field: EXPECTED[name][field] for field in fields}
    assert isinstance(report["bytes_per_token"], int)


@pytest.mark.parametrize("name", [name for name in sorted(EXPECTED) if "bytes_per_token_fp8" in EXPECTED[name]])
def test_fp8_numbers_are_those_worked_out_by_hand(kvweave: Kvweave, name: str) -> None:
    report = kvweave("plan", name, "--json", "--dtype", "fp8").json()
    assert report["bytes_per_token"] == EXPECTED[name]["bytes_per_token_fp8"]


@pytest.mark.parametrize("name", example_names())
def test_pages_and_padding_fill_the_pool(kvweave: Kvweave, name: str) -> None:
    report = kvweave("plan", name, "--json", "--memory", "40GiB").json()
    pools = {pool["name"]: pool for pool in report["pools"]}
    for entry in report["groups"]:
        pool = pools[entry["pool"]]
        null_page = pool["unit_bytes"]
        stride = entry["page_bytes"] + entry["padding_bytes"]
        assert stride * entry["num_pages"] == pool["bytes"] - null_page == pool["num_usable"] * pool["unit_bytes"]
        assert report["pool"]["pages"][entry["tag"]] == entry["num_pages"]
    used, unit = report["pool"]["bytes"], report["pools"][0]["unit_bytes"]
    assert used <= report["memory"] == 40 * GIB < used + unit


def test_the_plan_in_it_reads_back_as_the_plan_that_was_made(kvweave: Kvweave) -> None:
    report = kvweave("plan", "qwen3-next-80b", "--json", "--memory", "12GiB").json()
    made = make_plan(from_config(read_config("qwen3-next-80b")), "12GiB")
    assert Plan.from_dict(report["plan"]) == made
    assert report["sequences"] == {str(n): made.sequences(n) for n in (4096, 32768, 131072)}
    assert report["sequences"]["4096"] > report["sequences"]["32768"] > report["sequences"]["131072"] > 0


def test_a_group_says_what_it_keeps_and_for_how_long(kvweave: Kvweave) -> None:
    report = kvweave("plan", "gemma-3-27b", "--json").json()
    window = group(report, "window")
    assert window["reach"] == {"kind": "window", "tokens": 1024}
    assert window["layers"] == [layer for layer in range(62) if layer % 6 != 5]
    key = window["roles"][0]
    shape = {"name": "key", "shape": [16, 128], "dtype": "bfloat16", "tokens_per_row": 1, "row_bytes": 4096}
    assert {field: key[field] for field in shape} == shape
    assert window["page_bytes"] == 52 * 16 * 2 * 4096
    assert group(report, "full")["reach"] == {"kind": "full"}


def test_a_context_of_ones_own_is_counted_too(kvweave: Kvweave) -> None:
    report = kvweave("plan", "llama-3.1-8b", "--json", "--context", "100000").json()
    assert list(report["sequences"]) == ["4096", "32768", "100000", "131072"]
    assert report["sequences"]["100000"] == 6  # 40,960 pages, 6,250 each


def test_blocks_and_kernel_blocks_are_for_all_groups_or_for_one(kvweave: Kvweave) -> None:
    blocks = ("--block-tokens", "32", "--block-tokens", "indexer=64")
    kernels = ("--kernel-tokens", "16", "--kernel-tokens", "indexer=8")
    report = kvweave("plan", "deepseek-v3.2", "--json", *blocks, *kernels).json()
    assert [group(report, "latent")[key] for key in ("block_tokens", "kernel_tokens")] == [32, 16]
    assert [group(report, "indexer")[key] for key in ("block_tokens", "kernel_tokens")] == [64, 8]


def test_a_base_is_rounded_up_for_groups_that_were_not_named(kvweave: Kvweave) -> None:
    report = kvweave("plan", "deepseek-v4-flash", "--json", "--block-tokens", "32", "--block-tokens", "csa=64").json()
    blocks = {entry["tag"]: entry["block_tokens"] for entry in report["groups"]}
    assert [blocks[tag] for tag in ("window", "csa", "indexer", "hca", "csa_state")] == [32, 64, 32, 128, 4]


def test_a_kernel_block_that_a_group_cannot_read_is_left_to_those_that_can(kvweave: Kvweave) -> None:
    kernels = ("--kernel-tokens", "8", "--kernel-tokens", "csa=4")
    report = kvweave("plan", "deepseek-v4-flash", "--json", *kernels).json()
    tokens = {entry["tag"]: entry["kernel_tokens"] for entry in report["groups"]}
    assert [tokens[tag] for tag in ("window", "csa", "indexer", "hca", "csa_state")] == [8, 4, 8, 128, 4]


def test_a_share_gives_the_most_pages_that_it_holds(kvweave: Kvweave) -> None:
    options = ("--pool", "window=20%", "--memory", "50GiB", "--reserve", "10GiB")
    report = kvweave("plan", "gemma-3-27b", "--json", *options).json()
    window = group(report, "window")
    assert window["pool"] == "window"
    pages = window["num_pages"] + 1  # the NULL page
    assert pages * window["stride_bytes"] <= 8 * GIB < (pages + 1) * window["stride_bytes"]
    assert report["pool"]["bytes"] + report["reserve"] <= 50 * GIB
    assert report["pool"]["kind"] == "independent"


def test_a_host_pool_takes_no_device_memory(kvweave: Kvweave) -> None:
    report = kvweave("plan", "gemma-3-27b", "--json", "--memory", "2GiB", "--pool", "full=7000@pinned").json()
    full = next(pool for pool in report["pools"] if pool["name"] == "full")
    assert (full["place"], full["num_usable"]) == ("pinned", 7000)
    assert report["pool"]["host_bytes"] == full["bytes"] > 2 * GIB >= report["pool"]["bytes"]


def test_ranks_divide_heads_blocks_and_layers(kvweave: Kvweave) -> None:
    whole = kvweave("plan", "llama-3.1-8b", "--json").json()["bytes_per_token"]
    for options in (("--tp", "4"), ("--cp", "4"), ("--pp", "4", "--pp-rank", "3")):
        report = kvweave("plan", "llama-3.1-8b", "--json", *options).json()
        assert report["bytes_per_token"] == report["groups"][0]["bytes_per_token"] == whole / 4
    assert report["groups"][0]["layers"] == list(range(24, 32))
    assert report["parallel"]["pp_rank"] == 3


def test_a_stage_names_the_groups_of_the_other_stages(kvweave: Kvweave) -> None:
    report = kvweave("plan", "qwen3-next-80b", "--json", "--pp", "48").json()
    assert [(entry["tag"], entry["layers"], entry["num_pages"] > 0) for entry in report["groups"]] == [
        ("state", [0], True),
        ("full", [], False),
    ]


def test_draft_layers_of_the_checkpoint_join_on_demand(kvweave: Kvweave) -> None:
    report = kvweave("plan", "deepseek-v3", "--json", "--mtp").json()
    assert (report["num_layers"], report["draft_layers"]) == (61, [61])
    assert group(report, "latent")["layers"] == list(range(62))


def test_a_draft_is_read_in_the_dtype_of_its_target(kvweave: Kvweave, tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(read_config("eagle3-llama-3.1-8b") | {"torch_dtype": "float16", "dtype": "float16"}))
    report = kvweave("plan", "llama-3.1-8b", "--json", "--draft", str(draft)).json()
    assert group(report, "full")["layers"] == list(range(33))
    assert {role["dtype"] for role in group(report, "full")["roles"]} == {"bfloat16"}


def test_a_draft_may_have_groups_of_its_own(kvweave: Kvweave) -> None:
    options = ("--draft", "deepseek-v3-nextn", "--draft-own-groups")
    report = kvweave("plan", "llama-3.1-8b", "--json", *options).json()
    assert group(report, "draft.latent")["layers"] == [32]


def test_one_page_size_is_what_it_is_compared_with(kvweave: Kvweave) -> None:
    compared = kvweave("plan", "qwen3-next-80b", "--json").json()["one_page_size"]
    assert compared["block_tokens"]["full"] == 1056
    assert compared["bytes_per_sequence"] > compared["plan_bytes_per_sequence"] > 32768 * 24576


def test_explain_adds_its_sentences_to_the_object(kvweave: Kvweave) -> None:
    assert "explain" not in kvweave("plan", "gemma-3-27b", "--json").json()
    assert "group window: 52 layers" in kvweave("plan", "gemma-3-27b", "--json", "--explain").json()["explain"]


def test_the_steps_of_prefix_reuse_are_in_it_here_and_with_one_page_size(kvweave: Kvweave) -> None:
    report = kvweave("plan", "deepseek-v4-flash", "--json").json()
    assert (report["reuse_tokens"], report["one_page_size"]["reuse_tokens"]) == (128, 4096)
    assert report["gpu"] is None
