"""Small models and traces for the simulator's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from kvweave.plan import Plan, make_plan
from kvweave.sim import Request, Trace
from kvweave.spec import Full, Layer, LayerCache, ModelSpec, Reach, Role, State, Window

GRID = 4


def _cache(tag: str, reach: Reach, width: int) -> LayerCache:
    return LayerCache(tag, reach, (Role("key", (width,), "float32"),))  # type: ignore[arg-type]


def _model(*caches: LayerCache) -> ModelSpec:
    return ModelSpec("tiny", tuple(Layer((cache,)) for cache in caches))


FULL = _model(_cache("full", Full(), 4))
WINDOW = _model(_cache("full", Full(), 4), _cache("window", Window(9), 4))
STATES = _model(_cache("full", Full(), 4), _cache("state", State(), 64))
MODELS = {"full": FULL, "window": WINDOW, "states": STATES}


def plan_of(model: ModelSpec, memory: int | str = "1MiB") -> Plan:
    return make_plan(model, memory, block_tokens=GRID)


def trace_of(words: Sequence[Sequence[int]], outputs: Sequence[int] = ()) -> Trace:
    """A request a word; the last `outputs` tokens of it are generated."""
    sizes = [*outputs, *([0] * (len(words) - len(outputs)))]
    requests = (
        Request(float(at), np.array(word, np.int32), len(word) - size, size, f"s{at}")
        for at, (word, size) in enumerate(zip(words, sizes, strict=True))
    )
    return Trace("tiny", "tiny", 1, tuple(requests))


@st.composite
def traces(draw: st.DrawFn, most: int = 14) -> Trace:
    """Requests that go on from one another, part, and are asked again."""
    words: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        goes_on = bool(words) and draw(st.sampled_from([0, 1]))
        start = draw(st.sampled_from(words)) if goes_on else []
        cut = draw(st.integers(0, len(start)))
        words.append([*start[:cut], *draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))])
    outputs = [draw(st.integers(0, len(word) - 1)) for word in words]
    return trace_of(words, outputs)
