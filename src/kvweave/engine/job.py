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
    branches: tuple[int, ...] = ()
    """Where prompts that waited when it was opened part from its own: it leaves resume points there."""
    num_opened: int = 0
    """Tokens that its sequence was opened with; those after them are told when they are committed."""
    num_pending: int = 0
    """Tokens that steps under way will give."""
    num_cached: int | None = None
    """Tokens of its prompt that were found when it first ran."""
    num_stored: int = 0
    """Those of them that came from the store."""
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
        """Tokens, given or about to be, that are not computed yet; one, while it generates."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def is_answered(self) -> bool:
        """Whether its last token is there, or about to be."""
        return len(self.tokens) + self.num_pending - self.num_prompt >= self.max_new


class JobChunk(NamedTuple):
    """The tokens [start, end) of a job, for which its sequence has pages. `gives_token`: its next token follows."""

    job: Job
    sequence: Sequence
    start: int
    end: int
    gives_token: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and self.start > 0

    @property
    def ids(self) -> list[int]:
        """Its tokens, as far as they are known."""
        return self.job.tokens[self.start : self.end]

    @property
    def is_told(self) -> bool:
        """Whether the core learns its tokens when they are committed."""
        return self.end > self.job.num_opened


class StepPlan(NamedTuple):
    """What is computed next; `copies` are to be made before."""

    chunks: list[JobChunk]
    copies: list[Copies]
