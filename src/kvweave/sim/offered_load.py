"""Load figures: lengths and rates of a trace, also of one that does not tell which tokens requests share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvweave.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of prompts and outputs (mean, median, 95th percentile, most), and arrivals."""

    requests: int
    seconds: float
    prompt: tuple[float, float, float, float]
    output: tuple[float, float, float, float]
    requests_per_second: float
    prompt_tokens_per_second: float
    busiest_minute_tokens: int
    """Prompt tokens that arrived in the busiest minute."""


def load_of(trace: Trace) -> Load:
    prompts = np.array([request.prompt_tokens for request in trace.requests])
    outputs = np.array([request.output_tokens for request in trace.requests])
    _, minutes = np.unique(
        np.array([request.arrival for request in trace.requests]).astype(np.int64) // 60, return_inverse=True
    )
    seconds = max(trace.seconds, 1.0)
    return Load(
        len(prompts),
        trace.seconds,
        _spread(prompts),
        _spread(outputs),
        len(prompts) / seconds,
        float(prompts.sum()) / seconds,
        int(np.bincount(minutes, weights=prompts).max()),
    )


def _spread(sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[float, float, float, float]:
    middle, high = np.percentile(sizes, [50, 95])
    return float(sizes.mean()), float(middle), float(high), float(sizes.max())
