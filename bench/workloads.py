"""Seeded workloads of kinds that no trace in the repository's measurements has, as traces for `bench.simulate`.

`agents`: tool loops, whose prompts grow, interleaved, a few system prompts. `documents`: Zipf documents behind one
system prompt, a question of its own each. `scans`: a hot set, and long prompts that come once. `shifting`: the popular
documents change. `summaries`: long new documents, of which a third are asked about once more, soon. `rounds`: the same
prompts again and again, each round in another order.

Each request is (prompt, output) in blocks of 64 tokens; equal ids are equal tokens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count

import numpy as np

from kvweave.sim import Trace
from kvweave.sim.trace import Request, make_trace

BLOCK = 64
Ids = list[int]
Requests = Iterator[tuple[Ids, Ids, str]]
"""Prompt, output, session."""


class Source:
    """Random lengths, and blocks that nobody has had before."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = count(1)

    def blocks(self, low: int, high: int) -> Ids:
        """As many blocks as `low` to `high` tokens take, most nearer to `low`."""
        tokens = low * (high / low) ** self.random.random()
        return [next(self._ids) for _ in range(max(1, round(tokens / BLOCK)))]

    def zipf(self, ranks: int, power: float) -> Callable[[], int]:
        """Draws of a rank, the first the most often."""
        sums = list(accumulate((rank + 1) ** -power for rank in range(ranks)))
        return lambda: self.random.choices(range(ranks), cum_weights=sums)[0]


def agents(source: Source) -> Requests:
    systems = [source.blocks(2000, 6000) for _ in range(4)]
    running: list[tuple[float, int]] = []
    prompts: dict[int, Ids] = {}
    left: dict[int, int] = {}
    now = 0.0
    for session in range(240):
        now += source.random.expovariate(1.0)
        heapq.heappush(running, (now, session))
    while running:
        now, session = heapq.heappop(running)
        if session not in prompts:
            prompts[session] = [*source.random.choice(systems), *source.blocks(100, 4000)]
            left[session] = source.random.randrange(2, 24)
        answer = source.blocks(64, 600)
        yield prompts[session], answer, str(session)
        prompts[session] = [*prompts[session], *answer, *source.blocks(64, 4000)]
        left[session] -= 1
        if left[session]:
            heapq.heappush(running, (now + source.random.lognormvariate(1.5, 1.5), session))


def documents(source: Source) -> Requests:
    system, texts = source.blocks(800, 801), [source.blocks(1500, 20000) for _ in range(800)]
    draw = source.zipf(len(texts), 0.8)
    for number in range(2500):
        chosen = [draw() for _ in range(source.random.choice((1, 1, 2)))]
        context = [block for text in chosen for block in texts[text]]
        yield [*system, *context, *source.blocks(64, 400)], source.blocks(64, 500), str(number)


def scans(source: Source) -> Requests:
    hot = [source.blocks(3000, 10000) for _ in range(120)]
    draw = source.zipf(len(hot), 0.7)
    for number in range(2500):
        if source.random.random() < 0.6:
            yield [*hot[draw()], *source.blocks(64, 1000)], source.blocks(64, 500), str(number)
        else:
            yield source.blocks(8000, 40000), source.blocks(64, 500), str(number)


def shifting(source: Source) -> Requests:
    texts = [source.blocks(2000, 16000) for _ in range(600)]
    draw = source.zipf(len(texts), 1.0)
    for number in range(2500):
        text = texts[(draw() + 40 * (number // 250)) % len(texts)]
        prompt, answer = [*text, *source.blocks(64, 400)], source.blocks(64, 400)
        yield prompt, answer, str(number)
        if source.random.random() < 0.3:  # the next turn, at once
            yield [*prompt, *answer, *source.blocks(64, 400)], source.blocks(64, 400), str(number)


def summaries(source: Source) -> Requests:
    task, due = source.blocks(200, 201), dict[int, list[Ids]]()
    for number in range(900):
        document = [*task, *source.blocks(4000, 30000)]
        if source.random.random() < 0.35:
            due.setdefault(number + source.random.randrange(1, 12), []).append(document)
        for text in (document, *due.pop(number, [])):
            yield [*text, *source.blocks(64, 200)], source.blocks(100, 800), str(number)


def rounds(source: Source) -> Requests:
    prompts = [source.blocks(1500, 6000) for _ in range(90)]
    for number in range(16):
        for prompt in source.random.sample(prompts, len(prompts)):
            yield prompt, source.blocks(64, 300), str(number)


WORKLOADS = {
    "agents": agents,
    "documents": documents,
    "scans": scans,
    "shifting": shifting,
    "summaries": summaries,
    "rounds": rounds,
}


def workload(name: str, seed: int = 0) -> Trace:
    requests = []
    for number, (prompt, output, session) in enumerate(WORKLOADS[name](Source(seed))):
        ids = np.array([*prompt, *output], np.int32)
        requests.append(Request(number, ids, len(prompt) * BLOCK, len(output) * BLOCK, session))
    return make_trace(name, "workload", BLOCK, requests)
