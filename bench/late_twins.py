"""Requests that share a prompt which is being computed already: points left for them save what they share.

One prompt of 1,024 tokens; when its first 128 are computed, seven more that share 768 or 512 of its tokens come. A
small model of the Qwen3-Next kind, 128 tokens a step, 8 new tokens each. The peer is the same engine without them.

Run: make bench NAME=late_twins
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers

from bench.transformers_cpu import qwen
from kvweave.engine import Engine, Sampling
from kvweave.engine.scheduler import Scheduler

SHARED, NEW, ROUNDS = (768, 768, 768, 512, 512, 512, 512), 8, 2


class Served(NamedTuple):
    """Tokens that were computed, and by how much processor time; and the answers."""

    tokens: int
    cpu_s: float
    answers: list[tuple[int, ...]]


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        ids: list[int] = torch.randint(3, 8000, (count,), generator=chance).tolist()
        return ids

    shared = some(max(SHARED))
    return [shared + some(256), *(shared[:length] + some(32) for length in SHARED)]


def serve(model: Any) -> Served:
    first, *others = prompts()
    with Engine(model, "1GiB", budget=128, max_tokens=4096) as engine:
        counted, has_begun, run = list[int](), threading.Event(), engine._worker.executor.run

        def counting(chunks: Any) -> Any:
            counted.append(sum(chunk.num_tokens for chunk in chunks))
            has_begun.set()
            return run(chunks)

        with patch.object(engine._worker.executor, "run", counting):
            began = time.process_time()
            requests = [engine.submit(first, Sampling(NEW, stop_tokens=()))]
            has_begun.wait()
            requests += [engine.submit(ids, Sampling(NEW, stop_tokens=())) for ids in others]
            answers = [request.result(300).tokens for request in requests]
            return Served(sum(counted), time.process_time() - began, [tuple(answer) for answer in answers])


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = qwen().eval()
    for _ in range(ROUNDS):
        ours = serve(model)
        with patch.object(Scheduler, "_expect_branch", lambda *_: None):
            peer = serve(model)
        assert ours.answers == peer.answers
        for unit, mine, theirs in (("tokens", ours.tokens, peer.tokens), ("CPU seconds", ours.cpu_s, peer.cpu_s)):
            facts = {"claim": f"late twins, {unit}", "ours": mine, "peer": theirs, "unit": unit}
            print(json.dumps(facts | {"ratio": theirs / mine}), flush=True)


if __name__ == "__main__":
    main()
