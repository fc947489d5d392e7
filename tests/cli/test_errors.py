"""Whatever the user gets wrong: one line on stderr, exit code 2, no traceback, nothing on stdout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvweave.cli.plan_command
from kvweave.cli import main
from tests.cli.command import Kvweave

LLAMA = ("plan", "llama-3.1-8b")
COMMAND = (sys.executable, "-c", "from kvweave.cli import main; main()")

WRONG = {
    "no such path": (("plan", "nowhere/config.json"), "no config at 'nowhere/config.json'"),
    "a name with a slip": (("plan", "qwen3-nxt-80b"), "did you mean qwen3-next-80b?"),
    "no config at all": (("plan",), "Missing argument 'CONFIG'"),
    "unknown command": (("plam",), "Did you mean 'plan'? see kvweave --help"),
    "an address without a port": (("inspect", "--connect", "cache.local"), "an address is HOST:PORT"),
    "unknown option": ((*LLAMA, "--memry", "1GiB"), "No such option: --memry"),
    "option without a value": ((*LLAMA, "--memory"), "requires an argument"),
    "no number": ((*LLAMA, "--tp", "two"), "Invalid value for '--tp'"),
    "negative size": ((*LLAMA, "--memory", "-5GiB"), "cannot read '-5GiB' as a size"),
    "no size": ((*LLAMA, "--memory", "0"), "memory must be"),
    "too little memory": ((*LLAMA, "--memory", "1KiB"), "4194304 bytes (4.00 MiB) would"),
    "reserve beyond the memory": ((*LLAMA, "--reserve", "90GiB"), "96640958464 bytes (90.00 GiB) would"),
    "context beyond the memory": ((*LLAMA, "--context", "99999999"), "99999999 tokens"),
    "context beyond reason": ((*LLAMA, "--context", "9" * 20), "context must be 1 to 1,099,511,627,776 tokens"),
    "memory of many digits": ((*LLAMA, "--memory", "9" * 6000), "cannot read '999"),
    "pool of many digits": ((*LLAMA, "--pool", "full=" + "9" * 6000), "--pool: expected TAG=PAGES"),
    "memory beyond all ids": ((*LLAMA, "--memory", "9999TB"), "ids end at 2,147,483,647"),
    "unknown dtype": ((*LLAMA, "--dtype", "fp7"), "unknown cache dtype 'fp7'; did you mean 'fp8'?"),
    "unknown pools": ((*LLAMA, "--pools", "sharde"), "did you mean 'shared'?"),
    "unknown layout": ((*LLAMA, "--layout", "page"), "unknown layout 'page'"),
    "no ranks": ((*LLAMA, "--tp", "0"), "tp must be at least 1"),
    "rank out of range": ((*LLAMA, "--pp", "2", "--pp-rank", "2"), "pp_rank 2"),
    "empty stage": (("plan", "nemotron-h-56b", "--pp", "118", "--pp-rank", "1"), "stage 1 of 118"),
    "block of nothing": ((*LLAMA, "--block-tokens", "0"), "--block-tokens: expected N or TAG=N"),
    "block beyond reason": ((*LLAMA, "--block-tokens", "9" * 20), "--block-tokens: expected N or TAG=N"),
    "block of no group": ((*LLAMA, "--block-tokens", "indexer=64"), "unknown tag 'indexer'"),
    "kernel that divides nothing": ((*LLAMA, "--kernel-tokens", "3"), "kernel_tokens 3 does not divide"),
    "pool without a size": ((*LLAMA, "--pool", "full"), "--pool: expected TAG=PAGES"),
    "pool on the moon": ((*LLAMA, "--pool", "full=3@moon"), "--pool: expected TAG=PAGES"),
    "pool of no group": ((*LLAMA, "--pool", "window=30%"), "unknown tag of a pool 'window'"),
    "share of nothing": ((*LLAMA, "--pool", "full=0%"), "more than 0%"),
    "share below a page": ((*LLAMA, "--pool", "full=0.001%"), "less than a page"),
    "share of the host": ((*LLAMA, "--pool", "full=10%@host"), "a host pool needs a number of pages"),
    "pool twice": ((*LLAMA, "--pool", "full=3", "--pool", "full=4"), "full given twice"),
    "draft of another kind": ((*LLAMA, "--draft", "deepseek-v3-nextn"), "not among the target's (full)"),
    "own groups of no draft": ((*LLAMA, "--draft-own-groups"), "there is no --draft"),
    "picture in a file": ((*LLAMA, "--svg", f"{__file__}/memory.svg"), "cannot open"),
    "memory and a gpu": ((*LLAMA, "--memory", "8GiB", "--gpu", "80GiB"), "--memory is for the cache alone"),
    "weights of no gpu": ((*LLAMA, "--weights", "fp8"), "give --gpu, too"),
    "a gpu below its weights": ((*LLAMA, "--gpu", "16GiB"), "--tp 2 would do"),
    "weights that cannot be counted": (("plan", "zamba2-7b", "--gpu", "80GiB"), "for example --weights 16GiB"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(kvweave: Kvweave, what: str) -> None:
    argv, words = WRONG[what]
    run = kvweave(*argv)
    assert run.code == 2
    assert run.out == ""
    assert run.err.startswith("kvweave: error: ")
    assert run.err.count("\n") == 1
    assert words in run.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "not an object"),
        ("[" * 10**6, "is not valid JSON"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers must be at most 10,000"),
        ("{}", "num_hidden_layers is missing"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "must be a whole number"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads must be at least 1, got 0"),
        ('{"model_type": "bert", "num_hidden_layers": 2}', "bert is an encoder"),
    ],
)
def test_a_broken_config_is_one_line_too(kvweave: Kvweave, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    run = kvweave("plan", str(tmp_path))
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert words in run.err


def test_a_message_of_several_lines_becomes_one(kvweave: Kvweave) -> None:
    run = kvweave(*LLAMA, "--svg", f"{__file__}/no\nsuch\nfolder/memory.svg")
    assert (run.code, run.err.count("\n")) == (2, 1)


def test_a_bug_of_ours_is_not_dressed_up_as_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(kvweave.cli.plan_command, "answer", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(LLAMA)


def test_ctrl_c_ends_it_without_a_word(monkeypatch: pytest.MonkeyPatch, kvweave: Kvweave) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvweave.cli.examples.example_names", interrupted)
    run = kvweave("examples")
    assert (run.code, run.out, run.err.strip()) == (130, "", "")


def test_the_installed_command_exits_with_2_and_without_a_traceback() -> None:
    run = subprocess.run([*COMMAND, "plan", "nowhere"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("kvweave: error: no config at 'nowhere'")


@pytest.mark.parametrize("argv", [("plan", "gemma-3-27b"), ("plan", "gemma-3-27b", "--json"), ("examples",)])
def test_a_reader_that_goes_away_hears_nothing(argv: tuple[str, ...]) -> None:
    with subprocess.Popen([*COMMAND, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == ""
        assert run.wait() == 1
