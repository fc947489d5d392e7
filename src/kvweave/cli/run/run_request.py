"""The request and the result of `kvweave run`. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvweave.cache.contents import CacheContents
from kvweave.cli.plan_request import PlanResult
from kvweave.cli.run.outcome import RunOutcomes
from kvweave.cli.run.workload import WORKLOADS, WorkloadSize
from kvweave.errors import ConfigError, UnknownName

NEW_TOKENS = {"chat": 512, "prompts": 128, "workload": 16}
"""Most tokens of an answer, where nothing else is said."""

DEFAULT_SIZE = WorkloadSize(parties=3, turns=3, shared_tokens=768, turn_tokens=96)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The options of `kvweave run`, read and typed."""

    source: str
    prompts: tuple[str, ...] = ()
    chat: bool = False
    workload: str | None = None
    size: WorkloadSize = DEFAULT_SIZE
    memory: str = "1GiB"
    compare: bool = False
    max_new_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Of `Sampling`; none: greedy."""
    block_tokens: int = 16
    store: str | None = None
    weights: str | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    parameters: str = "24M"
    record: Path | None = None

    def __post_init__(self) -> None:
        ways = [
            name
            for name, given in (("--prompt", self.prompts), ("--chat", self.chat), ("--workload", self.workload))
            if given
        ]
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(ways)} exclude one another: give one of them")
        if self.workload is not None and self.workload not in WORKLOADS:
            raise UnknownName("workload", self.workload, WORKLOADS)
        if self.most_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens must be at least 1, got {self.most_new_tokens}")
        if self.compare and self.sampling:
            raise ConfigError("--compare needs answers that are the same again: leave --temperature out")
        if self.sampling and not self.sampling.get("temperature", 0) > 0:
            raise ConfigError(
                f"{', '.join(self.sampling)} say how to sample, and greedy answers are not sampled: give --temperature"
            )
        if self.weights is not None and self.store is None:
            raise ConfigError("--weights names weights for a store, and --store is not given")
        if any(not prompt for prompt in self.prompts):
            raise ConfigError("--prompt is empty: a prompt needs at least one token")

    @property
    def most_new_tokens(self) -> int:
        what = "chat" if self.chat else "prompts" if self.prompts else "workload"
        return NEW_TOKENS[what] if self.max_new_tokens is None else self.max_new_tokens

    @property
    def played(self) -> str:
        """The workload to play where there is neither prompt nor chat."""
        return self.workload or "agents"

    @property
    def num_requests(self) -> int | None:
        """How many requests there will be, where that is known."""
        if self.chat:
            return None
        return len(self.prompts) or self.size.requests


@dataclass(frozen=True, slots=True)
class RunResult:
    """A model, the outcomes of its requests, and its pages at the end."""

    request: RunRequest
    name: str
    about: tuple[str, ...]
    num_parameters: int
    answer: PlanResult
    outcomes: RunOutcomes
    snapshot: CacheContents
    store: Mapping[str, Any] | None = None
    """What the store was used for, by name; where there is one."""
    said: tuple[str, ...] = field(default=(), repr=False)
    """The answers as text."""

    @property
    def title(self) -> str:
        what = "chat" if self.request.chat else "prompts" if self.request.prompts else self.request.played
        return f"{self.name}: {what}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "model_type": self.answer.plan.model_type,
            "parameters": self.num_parameters,
            "dtype": self.answer.dtype,
            "device": self.request.device,
            "about": list(self.about),
            "memory": self.answer.plan.memory,
            "store": None if self.store is None else {"at": self.request.store, **self.store},
            **self.outcomes.to_dict(),
        }
