"""What a real engine records, `kvweave simulate` replays: the same requests, and the hits that the engine had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.plan import make_plan
from kvweave.sim import Options, read_trace, simulate
from kvweave.spec.hf import from_config
from tests.integrations.vllm.engines import engine, tokens

pytestmark = pytest.mark.slow


def test_a_recording_has_the_requests_and_the_hits_of_the_engine(model: Callable[..., Path], tmp_path: Path) -> None:
    path, first, second = tmp_path / "trace.jsonl", tokens(700), tokens(300, seed=3)
    with engine(model("gemma3"), {"store": f"{tmp_path / 'kv'}:100MiB", "record": str(path)}) as made:
        answers = [made.one(prompt) for prompt in (first, [*first, *second], second)]
        made.forget()
        answers += [made.one(first), made.one(first, salt="other")]
        answers += made.ask(first, second)
    trace = read_trace(path)
    assert [each.prompt_tokens for each in trace.requests][:5] == [700, 1000, 300, 700, 700]
    assert {each.output_tokens for each in trace.requests} == {8}
    assert [each.cached_tokens for each in trace.requests][:5] == [answer.cached for answer in answers][:5]
    assert trace.recorded_hits == sum(answer.cached for answer in answers)
    assert answers[3].cached >= 512, "from the store"
    assert answers[4].cached == 0, "of another salt"
    assert len({each.namespace for each in trace.requests}) == 2
    spec = from_config(json.loads((model("gemma3") / "config.json").read_text()))
    result = simulate(trace, lambda memory: make_plan(spec, memory), Options([64 << 20]))
    (cell,) = result.cells
    assert cell.requests == 7
    assert cell.split.hit >= 700 + 512 + 2 * 256, "of everything but the first two prompts and the salted one"
