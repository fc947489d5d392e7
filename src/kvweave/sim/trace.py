"""A trace: requests in the order of their arrival, as ids of blocks of tokens.

Equal ids stand for equal tokens; whether a prefix is shared is decided by comparing tokens, as everywhere. What a
reader had to make up (tails, outputs, arrival times, sessions) is listed in `invented` and shown with every result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadOption, LengthsOnly, TraceError

TokenIds = NDArray[np.int32]
MOST_TOKENS = 1 << 24
"""The longest request that a trace may hold: a larger number is a mistake, and would take all memory."""
MOST_TIME = 2.0**62
"""The latest time that a trace may hold, in whatever unit: whole seconds fit an int64."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request. `blocks` are the ids of its prompt and its output together, the last one perhaps cut short."""

    arrival: float
    """Seconds since the start of the trace."""
    blocks: TokenIds
    prompt_tokens: int
    output_tokens: int = 0
    session: str = ""
    namespace: str = ""
    cached_tokens: int | None = None
    """What the engine that recorded it found in its cache, where it said so."""

    @property
    def num_computed(self) -> int:
        """Tokens that pass through the model: all but the last one that it generated."""
        return self.prompt_tokens + max(0, self.output_tokens - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests by arrival. `block_tokens` tokens have one id; 0 where a trace holds lengths and nothing else."""

    name: str
    format: str
    block_tokens: int
    requests: tuple[Request, ...]
    invented: tuple[str, ...] = ()
    recorded_with: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine that recorded it: the `plan` and the `retention` of its cache, as JSON has them, and its
    `step_tokens`."""

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max((request.num_computed for request in self.requests), default=0)

    @property
    def seconds(self) -> float:
        return self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0

    @property
    def sessions(self) -> int:
        return len({request.session for request in self.requests})

    def tokens(self, request: Request) -> TokenIds:
        """The token ids of a request that are computed: each block's id, as often as it has tokens."""
        ids = request.blocks if self.block_tokens == 1 else np.repeat(request.blocks, self.block_tokens)
        return ids[: request.num_computed]

    @property
    def recorded_hits(self) -> int | None:
        """Tokens that the engine which recorded it found in its cache; None where it did not say."""
        known = [request.cached_tokens for request in self.requests if request.cached_tokens is not None]
        return sum(known) if known else None

    def check_content(self) -> None:
        """Raise `LengthsOnly` where nothing is known of what requests have in common."""
        if not self.block_tokens:
            raise LengthsOnly(
                f"{self.name}: a trace of format {self.format!r} holds lengths of requests and nothing of their tokens:"
                " how much of them a cache would reuse cannot be told from it. `--load` shows its load figures"
            )

    def sample(self, share: float, seed: int = 0) -> Trace:
        """The requests of a share of the sessions: of requests taken at random, few would find their predecessor."""
        if not 0 < share <= 1:
            raise BadOption(f"a sample is a share of the sessions from above 0 to 1, got {share}")
        if share == 1:
            return self
        kept = tuple(request for request in self.requests if _draw(request.session, seed) < share)
        if not kept:
            raise TraceError(f"{self.name}: none of its {self.sessions} sessions is in a sample of {share:g}")
        note = (
            f"a sample: {len(kept):,} of {len(self.requests):,} requests, whole sessions, share {share:g}, seed {seed}"
        )
        return replace(self, requests=kept, invented=(*self.invented, note))


def _draw(session: str, seed: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def make_trace(
    name: str,
    format: str,
    block_tokens: int,
    requests: Iterable[Request],
    invented: Sequence[str] = (),
    recorded_with: Mapping[str, Any] | None = None,
) -> Trace:
    """A trace of requests in any order: sorted by arrival (those of one moment stay in order), counted from 0. Those
    with an empty prompt are left out."""
    found = list(requests)
    ordered = sorted((request for request in found if request.prompt_tokens), key=lambda request: request.arrival)
    if not ordered:
        raise TraceError(f"{name}: no request with a prompt is in it")
    if len(ordered) < len(found):
        note = f"{len(found) - len(ordered):,} requests whose prompt has not one token are left out"
        invented = [*invented, note]
    start = ordered[0].arrival
    moved = tuple(replace(request, arrival=request.arrival - start) for request in ordered)
    return Trace(name, format, block_tokens, moved, tuple(invented), recorded_with or {})


def checked_tokens(where: str, what: str, value: object, least: int = 0) -> int:
    """A number of tokens that a trace says."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST_TOKENS:
        raise TraceError(f"{where}: {what} must be a number of {least} to {MOST_TOKENS:,}, got {value!r:.80}")
    return int(value)


def checked_time(where: str, what: str, value: Any) -> float:
    """A time that a trace says, as a number or as the text of one."""
    try:
        time = float(value)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not abs(time) <= MOST_TIME:
        raise TraceError(f"{where}: {what} must be a finite number, at most {MOST_TIME:g}, got {value!r:.80}")
    return time
