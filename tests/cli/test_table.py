"""What a person reads: `kvweave plan`, `kvweave examples` and `kvweave --help`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvweave import __version__, from_config
from kvweave.cli.source import example_names, read_config
from tests.cli.command import Kvweave


def row(out: str, start: str, number: int = 0) -> list[str]:
    """The words of a line that starts so; `number` chooses among several."""
    return [line.split() for line in out.splitlines() if line.startswith(start)][number]


@pytest.mark.parametrize("name", example_names())
def test_every_group_has_a_line_about_what_it_keeps_and_one_about_its_pages(kvweave: Kvweave, name: str) -> None:
    shown = kvweave("plan", name)
    assert shown.code == 0
    for tag, (_, layers) in from_config(read_config(name)).groups().items():
        assert row(shown.out, f"{tag} ")[1] == str(len(layers))
        assert row(shown.out, f"{tag} ", 1)[-2].endswith("%")


def test_the_table_says_the_numbers_that_matter(kvweave: Kvweave) -> None:
    out = kvweave("plan", "qwen3-next-80b").out
    assert out.startswith("qwen3_next: 48 layers, bfloat16\n")
    assert row(out, "full ") == ["full", "12", "full", "key,", "value", "2x256", "bf16"]
    assert row(out, "full ", 1) == ["full", "16", "24,576", "-", "384", "KiB", "0.00%", "218,079"]
    assert "73.69 MiB whatever its length, and 24,576 bytes a token" in out
    assert "97 x 32,768 tokens" in out
    assert "full 1,056 tokens" in out


def test_a_model_of_one_group_is_compared_with_nothing(kvweave: Kvweave) -> None:
    assert "One padded page size" not in kvweave("plan", "llama-3.1-8b").out


def test_ranks_drafts_and_kernel_blocks_show_where_there_are_any(kvweave: Kvweave) -> None:
    options = ("--tp", "2", "--pp", "2", "--pp-rank", "1", "--block-tokens", "64", "--kernel-tokens", "16")
    out = kvweave("plan", "llama-3.1-8b", "--draft", "eagle3-llama-3.1-8b", *options).out
    assert out.startswith("llama: 32 layers + 1 draft layer, bfloat16, tp 2, pp 2, stage 1\n")
    assert row(out, "full ", 1)[1:4] == ["64", "(kernel", "16)"]


def test_notes_and_the_end_of_the_model_are_said(kvweave: Kvweave) -> None:
    out = kvweave("plan", "gpt-oss-20b").out
    assert "note: config.json names no dtype: bfloat16 is assumed" in out
    assert "(the model itself ends at 8,192 tokens)" in kvweave("plan", "gemma-2-9b").out
    assert "the model itself ends" not in out


def test_explain_says_why(kvweave: Kvweave) -> None:
    assert "in a super-page" not in kvweave("plan", "gemma-3-27b").out
    assert "4 in a super-page" in kvweave("plan", "gemma-3-27b", "--explain").out


@pytest.mark.parametrize("columns", [80, 100, 160])
@pytest.mark.parametrize("command", [("plan", "deepseek-v4-flash"), ("plan", "inkling"), ("examples",)])
def test_nothing_is_wider_than_the_terminal_nor_cut_short(
    kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch, columns: int, command: tuple[str, ...]
) -> None:
    wide = set(kvweave(*command).out.split())
    monkeypatch.setenv("COLUMNS", str(columns))
    out = kvweave(*command).out
    assert max(map(len, out.splitlines())) <= columns
    assert "\u2026" not in out
    assert {word for word in wide if "\u2500" not in word} <= set(out.split())


def test_markup_in_a_config_is_shown_as_it_is(kvweave: Kvweave, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "[red]x[/blue]", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}'
    )
    assert kvweave("plan", str(path)).out.startswith("[red]x[/blue]: 1 layer,")


def test_examples_lists_every_bundled_config(kvweave: Kvweave) -> None:
    out = kvweave("examples").out
    assert [line.split()[0] for line in out.splitlines()[2:]] >= example_names()
    assert row(out, "llama-3.1-8b ")[1:] == ["32", "full", "(32)", "131,072", "0", "B"]


def test_version_and_help(kvweave: Kvweave) -> None:
    assert kvweave("--version").out == f"kvweave {__version__} (interpreted core)\n"
    assert kvweave().out == kvweave("--help").out
    shown = kvweave("plan", "--help").out
    for words in ("Examples", "kvweave plan qwen3-next-80b", "80GiB", "Draft models", "--kernel-tokens"):
        assert words in shown
