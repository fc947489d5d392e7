"""The connector in a real vLLM: first tokens and throughput cold, warm from memory and from disk, beside plain vLLM.

One engine at a time on this machine's CPU, a random model of the Gemma-3 kind (8 layers, 6 of them windows), best of
the rounds. Cold runs include all saves. On a machine that others use, too, engines one after the other say little: so
cold prompts and prompts that pass the store by (`skip_save`, `skip_load`) are also timed in turns, in one engine. Then
the time that vLLM's scheduler spends in our calls, a step of 64 requests.

Run: make bench NAME=vllm
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.integrations.vllm.engines import Engine, engine
from tests.integrations.vllm.models import CONFIGS, VOCABULARY, checkpoint
from tests.server.models import spawned

ROUNDS, PROMPT, SHORT, MANY, NEW, TURNS = 5, 1800, 256, 64, 16, 6
Params = Mapping[str, Any] | None
BY = {"kvweave.skip_save": True, "kvweave.skip_load": True}
OPTIONS = {"max_num_seqs": MANY, "max_num_batched_tokens": 2048}
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


def first_tokens(made: Engine, seed: int, params: Params = None) -> float:
    """Seconds to the first token of a long prompt, by itself."""
    return min(
        timed(lambda i=i: made.one(prompt(PROMPT, seed + i), new_tokens=1, params=params))  # type: ignore[misc]
        for i in range(ROUNDS)
    )


def throughput(made: Engine, seed: int) -> float:
    """Tokens a second, of many requests at once."""
    return max(MANY * (SHORT + NEW) / many(made, seed + 1000 * turn) for turn in range(2))


def many(made: Engine, seed: int, params: Params = None) -> float:
    """Seconds of many requests at once."""
    prompts = [prompt(SHORT, seed + i) for i in range(MANY)]
    return timed(lambda: made.ask(*prompts, new_tokens=NEW, params=params))


def cold_in_turns(made: Engine) -> tuple[float, float]:
    """How much longer cold prompts take than those that pass the store by: medians, of first tokens and of many."""
    ratios = list[tuple[float, float]]()
    for turn in range(TURNS):
        took = {}
        for params in (BY, None) if turn % 2 else (None, BY):
            seed = 200_000 + 2000 * turn + 1000 * (params is None)
            made.settle()
            took[params is None] = first_tokens(made, seed, params), many(made, seed + ROUNDS, params)
        ratios.append((took[True][0] / took[False][0], took[True][1] / took[False][1]))
    first, all_tokens = (statistics.median(column) for column in zip(*ratios, strict=True))
    return first, all_tokens


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


def report(what: str, ttft: float, rate: float, plain: tuple[float, float]) -> None:
    print(
        f"{what:<22} first token {ttft * 1e3:8.1f} ms ({plain[0] / ttft:5.2f}x)   {rate:9.0f} tokens/s"
        f" ({rate / plain[1]:5.2f}x)",
        flush=True,
    )


def measure(model: Path, name: str, store: Mapping[str, Any], plain: tuple[float, float]) -> None:
    with engine(model, store, **OPTIONS) as made:
        first_tokens(made, 90_000)
        cold = first_tokens(made, 0), throughput(made, 10_000)
        report(f"cold, {name}", *cold, plain)
        made.forget()
        made.scheduler.connector._store.flush()
        report(f"warm from {name}", first_tokens(made, 0), throughput(made, 10_000), plain)
        first, rest = cold_in_turns(made)
        print(f"{'':<22} cold, in turns with prompts that pass by: first token {first:.3f}, {MANY} requests {rest:.3f}")
        made.forget()
        watch = SchedulerTime(made)
        for what in ("computed", "loaded"):
            watch.steps.clear()
            made.ask(*(prompt(SHORT, 50_000 + i) for i in range(MANY)), new_tokens=60)
            worst, (call, longest) = max(map(Counter.total, watch.steps)), worst_call(watch.steps)
            print(
                f"{'':<22} our calls in a step of {MANY} requests, prompts {what}: median"
                f" {statistics.median(map(Counter.total, watch.steps)) * 1e6:.0f} us, worst {worst * 1e6:.0f} us,"
                f" {longest * 1e6:.0f} of them in {call}",
                flush=True,
            )
            made.forget()


def worst_call(steps: Sequence[Counter[str]]) -> tuple[str, float]:
    """What took longest in the step that took longest."""
    return max(steps, key=Counter.total).most_common(1)[0]


def main() -> None:
    CONFIGS["bench"] = ("Gemma3ForCausalLM", {**CONFIGS["gemma3"][1], "hidden_size": 256, "intermediate_size": 1024})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = checkpoint("bench", folder)
        with engine(model, None, **OPTIONS) as made:
            first_tokens(made, 90_000)
            plain = first_tokens(made, 0), throughput(made, 10_000)
        report("plain vLLM", *plain, plain)
        measure(model, "disk", {"store": f"{folder / 'kv'}:2GiB"}, plain)
        with spawned(folder / "kv.sock", "--memory", "1GiB"):
            measure(model, "memory", {"socket": str(folder / "kv.sock")}, plain)


if __name__ == "__main__":
    main()
