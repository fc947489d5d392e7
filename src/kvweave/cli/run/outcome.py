"""The outcome of each request: frozen records, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BaselineOutcome:
    """The same request without reuse: transformers' own cache, new each time.

    `differs_at` is the first new token that is another one, None where all are equal; `logprob_difference` is the
    largest of the logarithms of our tokens' probabilities, up to there.
    """

    first_token_seconds: float
    seconds: float
    differs_at: int | None
    logprob_difference: float


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request: tokens of its prompt, how many of them were found, and the time to its first token and its end."""

    who: str
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float
    plain: BaselineOutcome | None = None
    stored_tokens: int = 0
    """Of those found, the ones that came from the store."""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens

    @property
    def faster(self) -> float | None:
        """How many times earlier the first token came than without reuse."""
        return self.plain.first_token_seconds / self.first_token_seconds if self.plain else None

    @property
    def is_equal(self) -> bool:
        """Whether no token is known to differ."""
        return self.plain is None or self.plain.differs_at is None


@dataclass(frozen=True, slots=True)
class RunOutcomes:
    """All requests of a run, in order."""

    each: tuple[RequestOutcome, ...]

    @classmethod
    def of(cls, outcomes: Sequence[RequestOutcome]) -> RunOutcomes:
        return cls(tuple(outcomes))

    @property
    def prompt_tokens(self) -> int:
        return sum(outcome.prompt_tokens for outcome in self.each)

    @property
    def reused_tokens(self) -> int:
        return sum(outcome.reused_tokens for outcome in self.each)

    @property
    def stored_tokens(self) -> int:
        return sum(outcome.stored_tokens for outcome in self.each)

    @property
    def reused_share(self) -> float:
        return self.reused_tokens / max(1, self.prompt_tokens)

    @property
    def new_tokens(self) -> int:
        return sum(outcome.new_tokens for outcome in self.each)

    @property
    def compared(self) -> bool:
        return bool(self.each) and all(outcome.plain is not None for outcome in self.each)

    @property
    def first_token_seconds(self) -> float:
        """Summed over all requests."""
        return sum(outcome.first_token_seconds for outcome in self.each)

    @property
    def plain_first_token_seconds(self) -> float:
        return sum(outcome.plain.first_token_seconds for outcome in self.each if outcome.plain)

    @property
    def faster(self) -> float | None:
        """How many times shorter the time to first tokens was, summed over all requests, with and without a hit."""
        return self.plain_first_token_seconds / self.first_token_seconds if self.compared else None

    @property
    def saved_seconds(self) -> float | None:
        """Time until the end of all requests, without reuse less with it."""
        return sum(o.plain.seconds - o.seconds for o in self.each if o.plain) if self.compared else None

    @property
    def unequal(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.each if not outcome.is_equal]

    @property
    def logprob_difference(self) -> float:
        return max((outcome.plain.logprob_difference for outcome in self.each if outcome.plain), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as JSON has them."""
        return {
            "requests": [{**asdict(o), "computed_tokens": o.computed_tokens, "faster": o.faster} for o in self.each],
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "stored_tokens": self.stored_tokens,
            "reused_share": self.reused_share,
            "new_tokens": self.new_tokens,
            "first_token_seconds": self.first_token_seconds,
            "plain_first_token_seconds": self.plain_first_token_seconds if self.compared else None,
            "faster": self.faster,
            "saved_seconds": self.saved_seconds,
            "all_tokens_equal": not self.unequal if self.compared else None,
        }
