"""The connector in a real vLLM: first tokens and throughput cold, warm from memory and from disk, beside plain vLLM.

One engine at a time on this machine's CPU, random models of the Gemma-3 kind (8 layers, 6 of them windows), best of the
rounds. Cold runs include all saves. On a machine that others use, too, engines one after the other say little: so cold
prompts and prompts that pass the store by (`skip_save`, `skip_load`) are also timed in turns, in one engine. Then the
time that vLLM's scheduler spends in our calls, a step of 64 requests. A save costs by the byte, a prompt by the
operation: the small model makes some 4,000 operations for a byte of KV, the middle one 26,000, Gemma-3-27B 100,000.

Run: make bench NAME=vllm; or, after it, .venv-vllm/bin/python -m bench.vllm [--models middle]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.integrations.vllm.engines import Engine, engine
from tests.integrations.vllm.models import CONFIGS, VOCABULARY, checkpoint
from tests.server.models import spawned

PROMPT, SHORT, NEW, TURNS = 1800, 256, 16, 6


class Size(NamedTuple):
    """Of a model, and how much is asked of it."""

    fields: Mapping[str, int]
    rounds: int
    many: int


SIZES = {
    "small": Size({"hidden_size": 256, "intermediate_size": 1024}, 5, 64),
    "middle": Size({"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64}, 1, 16),
}
Params = Mapping[str, Any] | None
BY = {"kvweave.skip_save": True, "kvweave.skip_load": True}
OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def prompt(length: int, seed: int) -> list[int]:
    """Another one for every seed."""
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()
    return ids


def first_tokens(made: Engine, size: Size, seed: int, params: Params = None) -> float:
    """Seconds to the first token of a long prompt, by itself."""
    return min(
        timed(lambda i=i: made.one(prompt(PROMPT, seed + i), new_tokens=1, params=params))  # type: ignore[misc]
        for i in range(size.rounds)
    )


def many(made: Engine, size: Size, seed: int, params: Params = None) -> float:
    """Seconds of many requests at once."""
    prompts = [prompt(SHORT, seed + i) for i in range(size.many)]
    return timed(lambda: made.ask(*prompts, new_tokens=NEW, params=params))


def both(made: Engine, size: Size) -> tuple[float, float]:
    """Seconds to a first token, and of many requests."""
    return first_tokens(made, size, 0), min(many(made, size, 10_000 + 1000 * turn) for turn in range(2))


def cold_in_turns(made: Engine, size: Size) -> tuple[list[float], list[float]]:
    """Seconds to a first token and of many requests, medians: of cold prompts, and of those that pass the store by."""
    took = dict[bool, list[tuple[float, float]]]({True: [], False: []})
    for turn in range(TURNS):
        for params in (BY, None) if turn % 2 else (None, BY):
            seed = 200_000 + 2000 * turn + 1000 * (params is None)
            made.settle()
            first = first_tokens(made, size, seed, params)
            took[params is None].append((first, many(made, size, seed + size.rounds, params)))
    cold, by = ([statistics.median(column) for column in zip(*took[each], strict=True)] for each in (True, False))
    return cold, by


class SchedulerTime:
    """Seconds in our calls, by call, in each step: from one `build_connector_meta` to the next."""

    def __init__(self, made: Engine) -> None:
        self.steps, self._spent = list[Counter[str]](), Counter[str]()
        for name in CALLS:
            self._watch(made.scheduler.connector, name)

    def _watch(self, connector: Any, name: str) -> None:
        real = getattr(connector, name)

        def watched(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args)
            finally:
                self._spent[name] += time.perf_counter() - began  # type: ignore[assignment]
                if name == "build_connector_meta":
                    self.steps.append(self._spent)
                    self._spent = Counter()

        setattr(connector, name, watched)


def figure(claim: str, ours: float, peer: float, unit: str = "s") -> None:
    print(json.dumps({"claim": claim, "ours": ours, "peer": peer, "unit": unit, "ratio": peer / ours}), flush=True)


def compare(what: str, size: Size, ours: Sequence[float], peer: Sequence[float]) -> None:
    figure(f"{what}: first token after {PROMPT}", ours[0], peer[0])
    figure(f"{what}: {size.many} requests of {SHORT} + {NEW}", ours[1], peer[1])


def measure(model: Path, name: str, store: Mapping[str, Any], plain: tuple[float, float]) -> None:
    size = SIZES[name]
    with engine(model, store, **OPTIONS) as made:
        tier = f"{name} model, {'daemon' if 'socket' in store else 'disk'}"
        first_tokens(made, size, 90_000)
        compare(f"{tier}, cold, engine after engine", size, both(made, size), plain)
        made.forget()
        made.scheduler.connector._store.flush()
        compare(f"{tier}, warm", size, both(made, size), plain)
        compare(f"{tier}, cold, in turns with prompts that pass by", size, *cold_in_turns(made, size))
        made.forget()
        watch = SchedulerTime(made)
        for what in ("computed", "loaded"):
            watch.steps.clear()
            made.ask(*(prompt(SHORT, 50_000 + i) for i in range(size.many)), new_tokens=60)
            facts = {"claim": f"{tier}: our calls in a scheduler's step of {size.many} requests, {what}"}
            print(json.dumps(facts | scheduler_facts(watch.steps)), flush=True)
            made.forget()


def scheduler_facts(steps: Sequence[Counter[str]]) -> dict[str, object]:
    """The median step, and the worst with the call that took longest in it, in us."""
    worst = max(steps, key=Counter.total)
    call, longest = worst.most_common(1)[0]
    facts = {"ours": statistics.median(map(Counter.total, steps)) * 1e6, "unit": "us", "goal": 200}
    return facts | {"worst": worst.total() * 1e6, "worst call": call, "of it": longest * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    for name in parser.parse_args().models:
        CONFIGS[name] = ("Gemma3ForCausalLM", {**CONFIGS["gemma3"][1], **SIZES[name].fields})
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model = checkpoint(name, folder)
            with engine(model, None, **OPTIONS) as made:
                first_tokens(made, SIZES[name], 90_000)
                plain = both(made, SIZES[name])
            measure(model, name, {"store": f"{folder / 'kv'}:2GiB"}, plain)
            with spawned(folder / "kv.sock", "--memory", "1GiB"):
                measure(model, name, {"socket": str(folder / "kv.sock")}, plain)


if __name__ == "__main__":
    main()
