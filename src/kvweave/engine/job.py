"""A job: a request as the scheduler sees it, and the chunks of it that a step computes."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvweave.cache import Copies, Sequence
from kvweave.prefix import Tokens, as_tokens


@dataclass(eq=False, slots=True)
class Job:
    """Tokens to compute: those of the prompt, then those of the answer as they come. Jobs of higher priority go first,
    and of equal priority those that came first; tenants (`tenant`) take turns."""

    tokens: list[int]
    max_new: int
    priority: int = 0
    tenant: Hashable = ""
    prompt: Tokens = field(init=False, repr=False)
    number: int = -1
    """The order of arrival."""
    sequence: Sequence | None = field(default=None, repr=False)
    """Its pages, while it runs."""
    num_cached: int | None = None
    """Tokens of its prompt that were found when it first ran."""
    num_preempted: int = 0
    is_shared: bool = True
    """Whether what is computed may be found by others."""
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.prompt = as_tokens(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """The lower, the sooner."""
        return -self.priority, self.number

    @property
    def num_computed(self) -> int:
        return self.sequence.length if self.sequence else 0

    @property
    def num_left(self) -> int:
        """Known tokens that are not computed yet; one, while it generates."""
        return len(self.tokens) - self.num_computed


class JobChunk(NamedTuple):
    """The tokens [start, end) of a job, for which there are pages."""

    job: Job
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def gives_token(self) -> bool:
        """Whether the next token of the job follows from it."""
        return self.end == len(self.job.tokens)


class StepPlan(NamedTuple):
    """What is computed next; `copies` are to be made before."""

    chunks: list[JobChunk]
    copies: list[Copies]
