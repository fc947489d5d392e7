"""Sampling: each row by its own settings, drawn as probabilities say, the same again with the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvweave.engine.sampling import RowSampler, Sampling, logprobs, sample
from kvweave.errors import BadOption

VOCABULARY = 40
LOGITS = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def row(prompt: tuple[int, ...] = (1,), **options: Any) -> RowSampler:
    return RowSampler(Sampling(**options), prompt, VOCABULARY, torch.device("cpu"))


def theirs(logits: torch.Tensor, prompt: tuple[int, ...] = (1,), **options: Any) -> torch.Tensor:
    """The probabilities that transformers would draw from."""
    kinds: dict[str, Any] = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    steps = LogitsProcessorList([kind(options[name]) for name, kind in kinds.items() if name in options])
    return torch.softmax(steps(torch.tensor([prompt]), logits.clone()), -1)[0]


def test_rows_of_one_batch_have_their_own_settings() -> None:
    logits = LOGITS.repeat(4, 1)
    rows = [row(), row(temperature=1.0, top_k=1), row(temperature=5.0, top_p=1e-6), row(temperature=1.0, min_p=1.0)]
    assert sample(logits, rows).tolist() == [int(LOGITS.argmax())] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1}, {"temperature": 1.0, "repetition_penalty": 3.0},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.5},
    ],
)  # fmt: skip
def test_tokens_are_drawn_with_the_probabilities_of_transformers(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    count, prompt = 20_000, (int(LOGITS.argmax()), 3)
    shown = RowSampler(Sampling(**options), prompt, VOCABULARY, torch.device("cpu"))
    many = [shown] * 500
    drawn = torch.zeros(VOCABULARY)
    for _ in range(count // 500):
        if options.get("repetition_penalty"):
            shown.seen = torch.zeros(VOCABULARY, dtype=torch.bool)
            shown.seen[list(prompt)] = True
        drawn += torch.bincount(sample(LOGITS.repeat(500, 1), many), minlength=VOCABULARY)
    expected = theirs(LOGITS, prompt, **options)
    assert (drawn[expected == 0] == 0).all(), "a token that was cut off was drawn"
    assert (drawn / count - expected).abs().max() < 0.015


def test_a_seed_gives_the_same_tokens_whoever_else_is_in_the_batch() -> None:
    def answer(others: int) -> list[int]:
        rows = [*(row(temperature=1.0) for _ in range(others)), row(temperature=1.0, seed=7)]
        return [int(sample(LOGITS.repeat(len(rows), 1), rows)[-1]) for _ in range(20)]

    assert answer(0) == answer(3)
    assert len(set(answer(0))) > 1


def test_a_penalty_counts_tokens_of_the_answer_too() -> None:
    penalised = row(repetition_penalty=100.0)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5], logits[0, 6] = 2.0, 1.0
    assert [int(sample(logits, [penalised])) for _ in range(2)] == [5, 6]


def test_tokens_of_an_answer_cost_each_time_they_come_or_once() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5], logits[0, 6] = 4.5, 3.0
    options: list[dict[str, Any]] = [{"frequency_penalty": 1.0}, {"presence_penalty": 2.0}, {"presence_penalty": 1.0}]
    rows = [row(prompt=(5, 6), **each) for each in options]
    chosen = [sample(logits.repeat(3, 1), rows).tolist() for _ in range(5)]
    assert list(zip(*chosen, strict=True)) == [(5, 5, 6, 5, 6), (5, 6, 5, 5, 5), (5, 5, 5, 5, 5)]
    assert float(logits.max()) == 4.5, "the logits stay, for those who ask for logprobs"


def test_a_bias_forbids_or_forces_tokens_of_its_own_row_only() -> None:
    best = int(LOGITS.argmax())
    rows = [row(), row(logit_bias=((best, -100.0),)), row(temperature=1.0, logit_bias=((7, 100.0),))]
    chosen = sample(LOGITS.repeat(3, 1), rows).tolist()
    assert (chosen[0], chosen[2]) == (best, 7)
    assert chosen[1] == int(LOGITS[0].topk(2).indices[1])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"logit_bias": ((1, 101.0),)}, r"logit_bias=.* \(must be within 100 of 0\)"),
        ({"logit_bias": ((1, 1.0), (VOCABULARY, 1.0))}, f"from 0 to {VOCABULARY - 1}, not {VOCABULARY}$"),
        ({"frequency_penalty": 3.0}, r"frequency_penalty=3.0 \(must be within 2 of 0\)$"),
        ({"presence_penalty": float("nan")}, r"presence_penalty=nan \(must be within 2 of 0\)$"),
        ({"max_new_tokens": 0, "top_p": 2}, r"max_new_tokens=0 \(must be at least 1\), top_p=2 \(must be above 0,"),
        ({"logprobs": 21}, r"logprobs=21 \(must be from 0 to 20\)"),
        ({"logprobs": 1.5, "seed": True}, r"seed=True, logprobs=1.5 \(must be whole numbers\)$"),
    ],
)  # fmt: skip
def test_an_option_out_of_its_range_is_refused_with_the_range(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(BadOption, match=says):
        row(**wrong)


def test_logprobs_are_of_the_model_and_only_for_rows_that_ask() -> None:
    rows = [row(), row(temperature=1.0, logprobs=2, seed=0), row(logprobs=0)]
    logits = LOGITS.repeat(3, 1)
    chosen = sample(logits, rows)
    none, two, zero = logprobs(logits, rows, chosen)
    assert none is None
    assert two is not None
    assert zero is not None
    logs = LOGITS[0].log_softmax(-1)
    assert two.logprob == pytest.approx(float(logs[two.token]))
    assert [token for token, _ in two.top] == LOGITS[0].topk(2).indices.tolist()
    assert (zero.token, zero.top) == (int(LOGITS.argmax()), ())
