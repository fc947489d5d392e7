"""Sampling: the next tokens of a batch from their logits, each row with its own settings, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch

from kvweave.errors import BadOption
from kvweave.tensor import upload

MOST_PENALTY, MOST_BIAS, MOST_LOGPROBS = 2.0, 100.0, 20
"""The limits of OpenAI's API."""
COUNTS = ("max_new_tokens", "top_k", "seed", "logprobs")
LEAST_TEMPERATURE = 1e-30
"""Lower ones above 0 count as this, which float32 can divide by."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen. `temperature` 0 is greedy, whatever else is said.

    The `top_k` likeliest tokens (0: all) whose probabilities add up to `top_p`, and none below `min_p` of the
    likeliest, are left to choose from. `repetition_penalty` above 1 makes tokens of the prompt and the answer less
    likely. From the logit of a token of the answer `frequency_penalty` is taken as often as the token came, and
    `presence_penalty` once; `logit_bias` is added to the logits of its tokens. With a `seed` the answer is the same
    again, whatever else runs. `logprobs`: that many of the likeliest tokens are reported with the chosen one (None:
    nothing is). The answer ends after `max_new_tokens`, or with a token of `stop_tokens` (None: those that the model's
    generation config says).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in COUNTS}
        if wrong := [f"{name}={value!r}" for name, value in counts.items() if not _is_whole(value)]:
            raise BadOption(f"sampling cannot use {', '.join(wrong)} (must be whole numbers)")
        valid = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "at least 0, and finite"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0, and finite"),
            "frequency_penalty": (abs(self.frequency_penalty) <= MOST_PENALTY, f"within {MOST_PENALTY:g} of 0"),
            "presence_penalty": (abs(self.presence_penalty) <= MOST_PENALTY, f"within {MOST_PENALTY:g} of 0"),
            "logit_bias": (all(abs(bias) <= MOST_BIAS for _, bias in self.logit_bias), f"within {MOST_BIAS:g} of 0"),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "from -2**63 to 2**64 - 1"),
            "logprobs": (self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, f"from 0 to {MOST_LOGPROBS}"),
        }
        wrong = [f"{name}={getattr(self, name)} (must be {text})" for name, (fits, text) in valid.items() if not fits]
        if wrong:
            raise BadOption(f"sampling cannot use {', '.join(wrong)}")


def _is_whole(value: object) -> bool:
    return value is None or (isinstance(value, Integral) and not isinstance(value, bool))


class TokenLogprobs(NamedTuple):
    """The logarithm of a chosen token's probability, and the likeliest tokens with theirs, of the model itself: before
    temperature and all that narrows the choice."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RowSampler:
    """The state of one request's sampling: its random generator, and counts of its tokens. Raises `BadOption` if a
    biased token is not one of the vocabulary."""

    def __init__(self, sampling: Sampling, prompt: SequenceOf[int], vocabulary: int, device: torch.device) -> None:
        self.sampling = sampling
        self.generator: torch.Generator | None = None
        self.seen: torch.Tensor | None = None
        if sampling.seed is not None:
            self.generator = torch.Generator(device).manual_seed(sampling.seed)
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.seen[torch.tensor(prompt, device=device)] = True
        self.counts: torch.Tensor | None = None
        """How often each token came in the answer."""
        self.bias: torch.Tensor | None = None
        if sampling.frequency_penalty or sampling.presence_penalty:
            self.counts = torch.zeros(vocabulary, device=device)
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
                raise BadOption(f"logit_bias names tokens from 0 to {vocabulary - 1}, not {unknown[0]}")
            self.bias = torch.zeros(vocabulary, device=device)
            self.bias[torch.tensor(tokens, device=device)] = torch.tensor(biases, device=device)

    @property
    def shifts(self) -> bool:
        """Whether penalties or biases are added to its logits."""
        return self.counts is not None or self.bias is not None

    def shift(self, scores: torch.Tensor) -> None:
        """Add penalties and biases to the logits, in place."""
        if self.counts is not None:
            scores -= self.sampling.frequency_penalty * self.counts + self.sampling.presence_penalty * (self.counts > 0)
        if self.bias is not None:
            scores += self.bias

    def take(self, token: torch.Tensor) -> None:
        """A token was chosen."""
        if self.seen is not None:
            self.seen.index_fill_(0, token.view(1), True)
        if self.counts is not None:
            self.counts.index_add_(0, token.view(1), self.counts.new_ones(1))


def sample(logits: torch.Tensor, rows: SequenceOf[RowSampler]) -> torch.Tensor:
    """The next token of each row `[rows]` from logits `[rows, vocabulary]`; nothing waits for the device."""
    scores = logits.float()
    if any(row.seen is not None for row in rows):
        scores = _penalised(scores, rows)
    if any(row.shifts for row in rows):
        scores = _shifted(scores, rows)
    chosen = scores.argmax(-1)
    random = [number for number, row in enumerate(rows) if row.sampling.temperature > 0]
    if random:
        which = upload(np.array(random), logits.device)
        chosen[which] = _drawn(scores[which], [rows[number] for number in random])
    for row, token in zip(rows, chosen, strict=True):
        row.take(token)
    return chosen


def logprobs(logits: torch.Tensor, rows: SequenceOf[RowSampler], chosen: torch.Tensor) -> list[TokenLogprobs | None]:
    """Logprobs of the chosen tokens, for the rows that asked for them; None for the others."""
    most = max((row.sampling.logprobs or 0 for row in rows), default=0)
    if all(row.sampling.logprobs is None for row in rows):
        return [None] * len(rows)
    logs = logits.float().log_softmax(-1)
    own = logs.gather(1, chosen[:, None])[:, 0].tolist()
    best, tokens = (each.tolist() for each in logs.topk(max(1, most), dim=-1))
    found: list[TokenLogprobs | None] = []
    for number, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
        count = row.sampling.logprobs
        top = tuple(zip(tokens[number][:count], best[number][:count], strict=True))
        found.append(None if count is None else TokenLogprobs(token, own[number], top))
    return found


def _penalised(scores: torch.Tensor, rows: SequenceOf[RowSampler]) -> torch.Tensor:
    nothing = scores.new_zeros(scores.shape[1], dtype=torch.bool)
    seen = torch.stack([nothing if row.seen is None else row.seen for row in rows])
    penalty = _column([row.sampling.repetition_penalty for row in rows], scores)
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def _shifted(scores: torch.Tensor, rows: SequenceOf[RowSampler]) -> torch.Tensor:
    scores = scores.clone()  # they may be the model's logits, from which logprobs are computed
    for row, own in zip(rows, scores, strict=True):
        row.shift(own)
    return scores


def _drawn(scores: torch.Tensor, rows: SequenceOf[RowSampler]) -> torch.Tensor:
    """Draw from the softmax of what is left: the largest of probability / exponential noise is a fair draw."""
    temperatures = _column([max(row.sampling.temperature, LEAST_TEMPERATURE) for row in rows], scores)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperatures  # the largest is 0, so that none is infinite
    if any(row.sampling.top_k or row.sampling.top_p < 1 for row in rows):
        scores = _narrowed(scores, rows)
    least = _column([row.sampling.min_p for row in rows], scores)
    probabilities = scores.softmax(-1)
    probabilities = probabilities.masked_fill(probabilities < least * probabilities.amax(-1, keepdim=True), 0)
    noise = torch.empty_like(scores)
    for row, own in zip(rows, noise, strict=True):
        own.exponential_(generator=row.generator)
    return (probabilities / noise.clamp(min=1e-20)).argmax(-1)


def _narrowed(scores: torch.Tensor, rows: SequenceOf[RowSampler]) -> torch.Tensor:
    """Scores of all but the top k, and of those beyond the top p, are -inf; the likeliest always stays."""
    ordered, order = scores.sort(-1, descending=True)
    vocabulary = scores.shape[1]
    counts = _column([min(row.sampling.top_k or vocabulary, vocabulary) for row in rows], scores)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=scores.device) >= counts, -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill(before >= _column([row.sampling.top_p for row in rows], scores), -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def _column(values: SequenceOf[float], like: torch.Tensor) -> torch.Tensor:
    return upload(np.array(values, np.float32), like.device)[:, None]
