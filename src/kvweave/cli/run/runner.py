"""A run, from the model's directory to the last record. Needs torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from random import Random
from typing import Any

import transformers

from kvweave.cli.plan_request import PlanResult
from kvweave.cli.run.chat import converse, lines
from kvweave.cli.run.load_model import LoadedModel, load
from kvweave.cli.run.model_asker import ModelAsker
from kvweave.cli.run.outcome import RunOutcomes
from kvweave.cli.run.run_request import RunRequest, RunResult
from kvweave.cli.run.workload import WORKLOADS, PromptWriter, play
from kvweave.engine import Engine, Sampling
from kvweave.errors import ConfigError
from kvweave.integrations.transformers import KVWeave
from kvweave.sim import TraceWriter
from kvweave.store import Store

OnProgress = Callable[[str], None]


def run(request: RunRequest, on_request: OnProgress, tell: OnProgress) -> RunResult:
    """Load, generate, and look at the pages at the end. `on_request` is called when the model is loaded (with "")
    and after each answer."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    loaded = load(
        request.source, size=request.parameters, dtype=request.dtype, device=request.device, seed=request.seed
    )
    options: dict[str, Any] = {"block_tokens": request.block_tokens, "store": request.store, "weights": request.weights}
    with Engine(loaded.model, request.memory, **options) as engine:
        weave = engine.weave
        _check_length(request, weave)
        with _recording(request, engine) as recording:
            asker = ModelAsker(engine, _sampling(request, loaded.model), request.compare, recording)
            asker.warm_up()
            on_request("")
            said = _generate(request, loaded, asker, on_request, tell)
        answer = PlanResult(weave.plan, weave.served.spec, loaded.dtype)
        with weave.memory.core_lock:
            snapshot = weave.core.contents()
        outcomes, store = RunOutcomes.of(asker.outcomes), _store(weave)
    return RunResult(request, loaded.name, loaded.about, loaded.num_parameters, answer, outcomes, snapshot, store, said)


def _sampling(request: RunRequest, model: Any) -> Sampling:
    penalty = model.generation_config.repetition_penalty or 1.0
    chosen: dict[str, Any] = {"repetition_penalty": penalty, **request.sampling}
    return Sampling(request.most_new_tokens, seed=request.seed, **chosen)


def _recording(request: RunRequest, engine: Engine) -> AbstractContextManager[TraceWriter | None]:
    if request.record is None:
        return nullcontext()
    core, plan = engine.weave.core, engine.weave.plan
    how: dict[str, Any] = {"plan": plan, "retention": core.state.retention, "step_tokens": engine.budget}
    return TraceWriter(request.record, block_tokens=core.grid, **how)


def _store(weave: KVWeave) -> dict[str, Any] | None:
    """How the store was used. Of a store of this process, `stored` and `lost` are what its farthest tier, the one that
    the user named, stored and did not store once all writes were tried."""
    stats = weave.stats()
    if stats.store_declined:
        return {"declined": stats.store_declined}
    if stats.store is None:
        return None
    use = asdict(stats.store) | {"lost": {}, "last_error": ""}
    if isinstance(weave.store, Store):
        weave.store.flush()
        farthest = weave.store.stats().tiers[-1]
        use |= {"stored": farthest.stored, "lost": farthest.drops, "last_error": farthest.last_error}
    return use


def _check_length(request: RunRequest, weave: KVWeave) -> None:
    longest, most = request.size.longest(request.most_new_tokens), weave.served.spec.max_tokens
    if not request.prompts and not request.chat and most and longest > most:
        raise ConfigError(f"the workload grows to {longest:,} tokens, the model ends at {most:,}: make it smaller")


def _generate(
    request: RunRequest, loaded: LoadedModel, asker: ModelAsker, on_request: OnProgress, tell: OnProgress
) -> tuple[str, ...]:
    if request.chat:
        for about in (loaded.name, *loaded.about):
            tell(about)
        converse(asker, loaded.text, lines(), tell)
        return ()
    if request.prompts:
        return tuple(_prompt(loaded, asker, number, text, on_request) for number, text in enumerate(request.prompts, 1))
    asks = WORKLOADS[request.played](PromptWriter(loaded.text, Random(request.seed)), request.size)
    for ask in play(asks, lambda ask: asker.ask(ask.who, ask.prompt)):
        on_request(ask.who)
    return ()


def _prompt(loaded: LoadedModel, asker: ModelAsker, number: int, text: str, on_request: OnProgress) -> str:
    answer = asker.ask(f"prompt {number}", loaded.text.encode(text))
    on_request(f"prompt {number}")
    return loaded.text.decode(answer)
