"""`kvweave run`: prompts, chats and workloads on tiny models, compared with transformers' own cache."""

from __future__ import annotations

import builtins
import io
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvweave.cli.read_config import example_names
from kvweave.cli.run import chat, runner
from kvweave.cli.run.run_request import RunRequest
from kvweave.cli.run.text import ByteTokenizer
from kvweave.cli.run.workload import PromptWriter, WorkloadSize, agents, play
from kvweave.engine import Engine, EngineRequest
from tests.cli.command import Kvweave
from tests.cli.threads import one_thread  # noqa: F401

TINY = ("--size", "4M", "--memory", "64MiB", "--max-new-tokens", "4")
SMALL = ("--parties", "2", "--turns", "2", "--shared-tokens", "64", "--turn-tokens", "40")
GEMMA = ("run", "gemma-3-27b", *TINY)
COUNTING = "one two three four five six seven eight nine"
QWEN = ("run", "qwen3-next-80b", *TINY)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, saved, with a tokenizer of a few words."""
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def with_tokenizer(directory: Path, target: Path) -> Path:
    words = {
        word: number
        for number, word in enumerate(["?", *["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]])
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(target)
    return target


# ---- what is generated


@pytest.mark.parametrize(
    ("argv", "workload"),
    [(GEMMA, "agents"), (QWEN, "agents"), (GEMMA, "chat"), (QWEN, "rag")],
    ids=["window-agents", "states-agents", "window-chat", "states-rag"],
)
def test_a_workload_reuses_and_every_token_is_equal(kvweave: Kvweave, argv: tuple[str, ...], workload: str) -> None:
    report = kvweave(*argv, *SMALL, "--workload", workload, "--compare", "--json").json()
    assert report["all_tokens_equal"] is True
    assert len(report["requests"]) == 4
    assert report["requests"][0]["reused_tokens"] == 0
    assert all(request["reused_tokens"] >= 48 for request in report["requests"][-2:])
    for request in report["requests"]:
        assert request["reused_tokens"] + request["computed_tokens"] == request["prompt_tokens"]
        assert request["new_tokens"] == 4
        assert 0 < request["first_token_seconds"] <= request["seconds"]
        assert 0 < request["plain"]["first_token_seconds"] <= request["plain"]["seconds"]


def test_a_workload_is_the_same_each_time_and_another_with_another_seed() -> None:
    def prompts(seed: int) -> list[list[int]]:
        asks = agents(
            PromptWriter(ByteTokenizer(), Random(seed)),
            WorkloadSize(parties=2, turns=2, shared_tokens=64, turn_tokens=40),
        )
        return [ask.prompt for ask in play(asks, lambda _: [1, 2, 3])]

    assert prompts(0) == prompts(0)
    assert prompts(0) != prompts(1)
    assert [len(prompt) for prompt in prompts(1)] == [104, 104, 147, 147]
    first, other, again, _ = prompts(0)
    assert first[:64] == other[:64]
    assert again[:107] == [*first, 1, 2, 3]


def test_a_second_turn_reuses_the_answer_of_the_first(kvweave: Kvweave) -> None:
    long = ("--max-new-tokens", "40", "--parties", "1", "--turns", "2", "--shared-tokens", "64", "--turn-tokens", "24")
    first, second = kvweave(*GEMMA, *long, "--json").json()["requests"]
    assert second["reused_tokens"] > first["prompt_tokens"]


def test_prompts_share_what_they_start_with_and_answers_are_shown(kvweave: Kvweave) -> None:
    start = "Once upon a time there was a page that nobody had read."
    run = kvweave(*GEMMA, "--prompt", f"{start} One", "--prompt", f"{start} Two", "--compare")
    assert run.code == 0, run.err
    assert "answer 1: " in run.out
    assert "answer 2: " in run.out
    row = next(line.split() for line in run.out.splitlines() if line.startswith("prompt 2"))
    assert row[2:5] == ["59", "48", "11"]
    assert "All 8 generated tokens are equal" in run.out


def test_a_chat_reads_lines_through_a_pipe_until_it_is_quit(kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "hello, who are you, and how many of the tokens that I say are so many that you keep a state of them?"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{first}\n\nand what do you keep?\n/quit\nnot heard\n"))
    run = kvweave(*QWEN, "--chat", "--compare")
    assert run.code == 0, run.err
    assert f"you> {first}" in run.out
    assert "not heard" not in run.out
    said = [line for line in run.out.splitlines() if "prompt tokens reused, first token after" in line]
    assert len(said) == 2
    assert said[0].startswith("[0 of ")
    assert not said[1].startswith("[0 of ")


def test_a_chat_says_its_model_first_and_only_sums_at_the_end(
    kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    lines = kvweave(*QWEN, "--chat").out.splitlines()
    assert lines[0] == "[qwen3-next-80b scaled to 2.1M]"
    assert "".join(lines).count("random weights") == 1
    assert lines[-1].startswith("The first token came after")


def test_ctrl_c_ends_an_answer_and_not_the_chat(kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch) -> None:
    add = chat.AnswerPrinter.add
    interrupted: list[chat.AnswerPrinter] = []

    def until_the_third(printer: chat.AnswerPrinter, token: int) -> None:
        add(printer, token)
        if len(printer.tokens) == 3 and not interrupted:
            interrupted.append(printer)
            raise KeyboardInterrupt

    monkeypatch.setattr(chat.AnswerPrinter, "add", until_the_third)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello, who are you, and what do you keep?\nand now?\n"))
    run = kvweave(*GEMMA, "--chat")
    assert run.code == 0, run.err
    assert "[stopped after 3 tokens]" in run.out
    assert run.out.count("prompt tokens reused, first token after") == 1


def test_ctrl_c_at_the_prompt_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", interrupted)
    assert list(chat.lines()) == []


def test_answers_are_sampled_by_a_seed_where_a_temperature_is_given(kvweave: Kvweave) -> None:
    ask = (*GEMMA[:-2], "--max-new-tokens", "24", "--prompt", "Once upon a time", "--seed", "1")

    def answer(*how: str) -> str:
        return next(line for line in kvweave(*ask, *how).out.splitlines() if line.startswith("answer 1: "))

    sampled = [answer("--temperature", "1.5", "--top-k", "50") for _ in range(2)]
    assert sampled[0] == sampled[1] != answer()


@pytest.mark.parametrize(
    ("how", "most"), [({"chat": True}, 512), ({"prompts": ("x",)}, 128), ({}, 16), ({"max_new_tokens": 7}, 7)], ids=str
)
def test_answers_are_as_long_as_their_use_asks(how: dict[str, Any], most: int) -> None:
    assert RunRequest("gemma-3-27b", **how).most_new_tokens == most


def test_a_chat_in_which_nothing_is_said_ends_with_that(kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert kvweave(*GEMMA, "--chat").out.endswith("\nNothing was asked.\n")


def test_the_end_of_a_typed_chat_ends_the_line_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(prompt: str) -> str:
        print(prompt, end="")
        raise EOFError

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", ended)
    assert list(chat.lines()) == []
    assert capsys.readouterr().out == "you> \n"


@pytest.mark.parametrize(("name", "size"), [("zamba2-7b", "2M"), ("gpt-oss-20b", "2M"), ("longcat-flash", "3M")])
def test_a_scaled_model_is_one_that_runs(kvweave: Kvweave, name: str, size: str) -> None:
    """Powers of two divide neither the 112 heads of Zamba 2 nor make 2,880 a width that kernels can read."""
    options = ("--memory", "64MiB", "--max-new-tokens", "2", "--prompt", "hello", "--compare", "--json")
    report = kvweave("run", name, "--size", size, *options).json()
    assert report["parameters"] <= float(size[:-1]) * 1e6
    assert report["all_tokens_equal"] is True


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2M", "5M", "20M"])
@pytest.mark.parametrize("name", example_names())
def test_every_example_runs_at_every_size_or_is_refused_by_name(kvweave: Kvweave, name: str, size: str) -> None:
    run = kvweave("run", name, "--size", size, "--memory", "256MiB", "--max-new-tokens", "2", "--prompt", "hello")
    assert run.code == 0 or (run.code == 2 and run.err.count("\n") == 1), run.err
    assert run.code == 0 or any(word in run.err for word in (name, "cannot be served"))


def test_what_was_scaled_is_said_exactly(kvweave: Kvweave) -> None:
    run = kvweave(*GEMMA, "--prompt", "x")
    out = " ".join(run.out.split())
    assert "gemma-3-27b scaled to 2.9M: " in out
    assert "layers window (10), full (2)" in out
    assert "widths and heads / 32, the first 12 of 62 layers" in out
    assert "hidden_size 5,376 -> 168" in out


# ---- stores

STORY = "Once upon a time there was a page that everybody had read. " * 10


@pytest.mark.parametrize("argv", [GEMMA, QWEN], ids=["window", "states"])
def test_the_next_run_starts_warm_and_every_token_is_equal(
    kvweave: Kvweave, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    command = (*argv, "--prompt", STORY, "--store", str(tmp_path / "kv"), "--compare", "--json")
    cold, warm = kvweave(*command).json(), kvweave(*command, "--block-tokens", "64").json()
    assert [run["stored_tokens"] for run in (cold, warm)] == [0, 512]
    assert cold["store"]["stored"] > 0
    assert (warm["store"]["at"], warm["store"]["loaded_tokens"]) == (str(tmp_path / "kv"), 512)
    assert all(run["all_tokens_equal"] for run in (cold, warm))
    other = kvweave(*command, "--seed", "1").json()
    assert other["stored_tokens"] == 0, "other weights never meet"


def test_what_came_from_memory_from_the_store_and_was_computed_is_shown(kvweave: Kvweave, tmp_path: Path) -> None:
    for _ in range(2):
        report = tmp_path / "report.html"
        argv = ("--prompt", STORY, "--prompt", f"{STORY} The end.", "--store", f"{tmp_path / 'kv'}:64MiB")
        run = kvweave(*GEMMA, *argv, "--weights", "tiny", "--report", str(report))
        assert run.code == 0, run.err
    rows = [line.split() for line in run.out.splitlines() if line.startswith("prompt ")]
    assert rows[0][2:6] == ["590", "0", "512", "78"]
    assert rows[1][2:6] == ["599", "576", "0", "23"]
    assert f"512 tokens came from the store {tmp_path / 'kv'}:64MiB in " in run.out.replace("\n", " ")
    page = report.read_text()
    assert "512 of them from the store" in page
    assert "<th>of these stored</th>" in page


def test_a_store_that_nobody_answers_at_is_not_said_to_have_stored_anything(kvweave: Kvweave) -> None:
    command = (*GEMMA, "--prompt", STORY, "--store", "redis://127.0.0.1:1")
    run = kvweave(*command)
    said = " ".join(run.out.split())
    assert run.code == 0, run.err
    assert "0 blobs went there" in said
    assert "4 blobs could not be stored in redis://127.0.0.1:1 (failed 4); its last error: tier 'redis'" in said
    assert kvweave(*command, "--json").json()["store"]["lost"] == {"failed": 4}


def test_a_chat_shorter_than_a_chunk_says_why_nothing_was_stored(
    kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    run = kvweave(*GEMMA, "--chat", "--store", str(tmp_path / "kv"))
    assert run.code == 0, run.err
    said = " ".join(run.out.split())
    assert (
        "Nothing was stored: a store keeps whole chunks of 256 tokens, and the longest prompt with its answer" in said
    )
    assert "blobs" not in said


@pytest.mark.parametrize(("prompt_tokens", "stored"), [(252, 0), (253, 2)])
def test_the_last_token_of_an_answer_does_not_complete_a_chunk(
    kvweave: Kvweave, tmp_path: Path, prompt_tokens: int, stored: int
) -> None:
    """A token is a byte, and answers have four, of which three have KV."""
    run = kvweave(*GEMMA, "--prompt", "x" * prompt_tokens, "--store", str(tmp_path / "kv"))
    said = " ".join(run.out.split())
    assert ("Nothing was stored" in said) == (not stored)
    assert (f"{stored} blobs went there" in said) == bool(stored)


def test_a_model_that_gains_nothing_from_a_store_says_so(kvweave: Kvweave, tmp_path: Path) -> None:
    run = kvweave("run", "jamba-1.5-mini", *TINY, "--prompt", "x" * 300, "--store", str(tmp_path / "kv"))
    assert run.code == 0, run.err
    assert "Nothing was stored: behind a prefix" in run.out
    assert not (tmp_path / "kv").exists()


# ---- directories


def test_a_model_directory_runs_and_is_equal(kvweave: Kvweave, directory: Path, tmp_path: Path) -> None:
    path = with_tokenizer(directory, tmp_path)
    text = f"{COUNTING} {COUNTING}"
    run = kvweave("run", str(path), "--prompt", text, "--prompt", f"{text} one", "--compare", "--max-new-tokens", "4")
    assert run.code == 0, run.err
    row = next(line.split() for line in run.out.splitlines() if line.startswith("prompt 2"))
    assert row[2:5] == ["19", "16", "3"]


def test_a_directory_without_a_tokenizer_reads_bytes_and_says_so(kvweave: Kvweave, directory: Path) -> None:
    run = kvweave("run", str(directory), "--prompt", "x" * 40, "--max-new-tokens", "2")
    assert run.code == 0, run.err
    assert "a token is a byte" in run.out
    assert "40" in run.out


# ---- comparison can fail


class Forgetful(Engine):
    """Wipes its pages before each request, so that what is found is wrong."""

    def submit(self, *prompt: Any, **options: Any) -> EngineRequest:
        with self.weave.memory.core_lock:
            for memory in self.weave.arena.tensors().values():
                memory.zero_()
        return super().submit(*prompt, **options)


@pytest.mark.parametrize("argv", [GEMMA, QWEN], ids=["window", "states"])
def test_a_token_that_differs_is_exit_code_1_and_one_line(
    kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setattr(runner, "Engine", Forgetful)
    run = kvweave(*argv, *SMALL, "--compare")
    assert run.code == 1
    assert run.err.startswith("kvweave: ")
    assert "answers differ from those without reuse, the first in 'agent 2, turn 1' at new token" in run.err
    assert run.err.count("\n") == 1
    assert "NO, from" in run.out
    assert "are equal" not in run.out


# ---- mistakes

WRONG = {
    "no such directory": (("run", "./nowhere"), "no config at './nowhere'"),
    "unknown example": (("run", "qwen3-nxt-80b"), "did you mean qwen3-next-80b?"),
    "a type that transformers lacks": (("run", "step-3"), "this transformers has no model of type"),
    "a family that is refused": (("run", "recurrent-gemma-9b", *TINY), "cannot be served: layer 0 keeps a state"),
    "not enough memory": ((*GEMMA[:-4], "--memory", "1KiB"), "would"),
    "no room for one prompt": (
        (*GEMMA[:-4], "--memory", "700KiB", "--prompt", "x" * 3000),
        "a sequence of 3128 tokens, those from 3127 on in one step, takes",
    ),
    "two things at once": ((*GEMMA, "--chat", "--prompt", "x"), "--prompt and --chat exclude one another"),
    "unknown workload": ((*GEMMA, "--workload", "agent"), "did you mean 'agents'?"),
    "an empty prompt": ((*GEMMA, "--prompt", ""), "--prompt is empty"),
    "no new tokens": ((*GEMMA[:-2], "--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
    "no turns": ((*GEMMA, "--turns", "0"), "1 turn"),
    "no size": ((*GEMMA, "--size", "large"), "cannot read 'large' as a number of parameters"),
    "too small a size": ((*GEMMA, "--size", "9"), "cannot be scaled down to 9 parameters: "),
    "a size that its parts do not have": (("run", "mimo-v2-flash", "--size", "2M"), "is the least, give --size 2.2M"),
    "sampled and compared": ((*GEMMA, "--temperature", "1", "--compare"), "leave --temperature out"),
    "narrowed and greedy": ((*GEMMA, "--top-p", "0.9"), "top_p say how to sample, and greedy answers are not sampled"),
    "a chat in JSON": ((*GEMMA, "--chat", "--json"), "--chat and --json both write to stdout"),
    "unknown dtype": ((*GEMMA, "--dtype", "float23"), "did you mean 'float32'?"),
    "a workload beyond reason": ((*GEMMA, "--parties", "1000000000000"), "at most 10,000 requests"),
    "turns beyond reason": ((*GEMMA, "--turn-tokens", "1000000000000"), "at most 10,000 requests and 16,777,216"),
    "a seed of too many bits": ((*GEMMA, "--seed", "9" * 30), "a seed has 64 bits"),
    "weights for no store": ((*GEMMA, "--weights", "x"), "--store is not given"),
    "a store of an unknown kind": ((*GEMMA, "--store", "s33://bucket"), "did you mean 's3'?"),
    "a store that is a file": ((*GEMMA, "--store", "/dev/null"), "/dev/null"),
    "a daemon that is not there": ((*GEMMA, "--store", "unix:///nowhere.sock"), "nowhere.sock"),
    "unknown device": ((*GEMMA, "--device", "tpu"), "unknown device 'tpu'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(kvweave: Kvweave, what: str) -> None:
    argv, words = WRONG[what]
    run = kvweave(*argv)
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith("kvweave: error: ")
    assert run.err.count("\n") == 1
    assert words in run.err


def test_a_directory_without_weights_says_how_to_run_its_shape(
    kvweave: Kvweave, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    run = kvweave("run", str(tmp_path))
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert f"kvweave run {tmp_path / 'config.json'}" in run.err
    assert kvweave("run", str(tmp_path / "config.json"), "--prompt", "hello", *TINY).code == 0


def test_a_workload_longer_than_the_model_is_refused(kvweave: Kvweave, directory: Path) -> None:
    run = kvweave("run", str(directory))
    assert run.code == 2
    assert "the model ends at 512" in run.err


def test_other_commands_load_neither_torch_nor_transformers() -> None:
    program = "import sys, kvweave.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_machine_without_transformers_is_told_what_to_install() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None; from kvweave.cli import main; main(['run', 'gemma-3-27b'])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert "pip install 'kvweave[transformers]'" in run.stderr
    assert run.stderr.count("\n") == 1
