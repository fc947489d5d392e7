"""What a person reads: `kvweave plan`, `kvweave examples` and `kvweave --help`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvweave import __version__, from_config
from kvweave.cli.read_config import example_names, read_config
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
    assert "keeps 73.69 MiB of states, 24,576 bytes a token" in out


def test_the_table_leads_with_what_a_user_decides_by(kvweave: Kvweave) -> None:
    fits, keeps, reuse, usual, *_ = kvweave("plan", "qwen3-next-80b").out.splitlines()[2:]
    assert fits.split("  ")[0] == "fits at once"
    assert "97 x 32,768 tokens" in fits
    assert keeps.startswith("a sequence ")
    assert " ".join(reuse.split()) == "prefix reuse in steps of 16 tokens (blocks of 16)"
    assert "in steps of 128 tokens (blocks of 4 to 128)" in kvweave("plan", "deepseek-v4-flash").out
    assert "steps of 1,056 tokens; a sequence of 32,768 tokens holds 1.03 times the bytes" in usual


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma-3-27b", "keeps up to 416 MiB of windows, 81,920 bytes a token"),
        ("llama-3.1-8b", "keeps 131,072 bytes a token"),
        ("mamba2-2.7b", "of states"),
    ],
)
def test_a_window_costs_up_to_its_bytes_and_a_state_all_of_them(kvweave: Kvweave, name: str, words: str) -> None:
    assert words in kvweave("plan", name).out


def test_a_window_beyond_the_context_is_full_attention_and_costs_as_much(kvweave: Kvweave, tmp_path: Path) -> None:
    config = read_config("mistral-7b-v0.1") | {"sliding_window": 262144, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = kvweave("plan", str(tmp_path)).out
    assert "keeps up to 4 GiB of windows" in out
    assert "window 262,144 (beyond the context: full)" in out
    assert "note: group 'window' reaches 262,144 tokens back" in out


def test_what_ranks_do_not_divide_is_noted(kvweave: Kvweave) -> None:
    out = " ".join(kvweave("plan", "llama-3.1-8b", "--tp", "3").out.split())
    assert "note: group 'full': the 8 heads or groups of key, value are not divided by tp 3" in out


def test_blocks_that_seldom_end_together_are_noted_once_and_only_there(kvweave: Kvweave) -> None:
    run = kvweave("plan", "gemma-3-27b", "--block-tokens", "full=1024", "--block-tokens", "window=1023")
    assert "in steps of 1,047,552 tokens" in run.out
    assert " ".join(run.out.split()).count("choose block_tokens that divide one another") == 1
    assert run.err == ""


def test_a_model_of_one_group_is_compared_with_nothing(kvweave: Kvweave) -> None:
    assert "one page size" not in kvweave("plan", "llama-3.1-8b").out


def test_ranks_drafts_and_kernel_blocks_show_where_there_are_any(kvweave: Kvweave) -> None:
    options = ("--tp", "2", "--pp", "2", "--pp-rank", "1", "--block-tokens", "64", "--kernel-tokens", "16")
    out = kvweave("plan", "llama-3.1-8b", "--draft", "eagle3-llama-3.1-8b", *options).out
    assert out.startswith("llama: 32 layers + 1 draft layer, bfloat16, tp 2, pp 2, stage 1\n")
    assert row(out, "full ", 1)[1:4] == ["64", "(kernel", "16)"]


def test_notes_and_the_end_of_the_model_are_said(kvweave: Kvweave) -> None:
    out = kvweave("plan", "gpt-oss-20b").out
    assert "note: config.json names no dtype: bfloat16 is assumed" in out
    assert "(the model itself ends at 8,192 tokens)" in " ".join(kvweave("plan", "gemma-2-9b").out.split())
    assert "the model itself ends" not in out


def test_explain_says_why(kvweave: Kvweave) -> None:
    assert "so groups take super-pages" not in kvweave("plan", "gemma-3-27b").out
    out = " ".join(kvweave("plan", "gemma-3-27b", "--explain").out.split())
    assert "pages differ in size, so groups take super-pages of 26.25 MiB" in out
    assert "it reaches 1,024 tokens back, so a sequence never holds more than 65 blocks" in out


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 160])
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
    assert "<bool>" not in shown + kvweave("--help").out
