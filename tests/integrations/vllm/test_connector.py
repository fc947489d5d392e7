"""Calls of vLLM's to the connector, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.errors import CannotServe
from kvweave.integrations.vllm import KVWeaveConnector, adapter
from kvweave.integrations.vllm.running_saves import RunningSaves, SavedRange
from kvweave.integrations.vllm.step_messages import TableSlice, WorkerReport

pytestmark = pytest.mark.slow


def test_an_idle_engine_goes_on_until_its_saves_have_ended_and_holds_blocks_until_they_are_copied() -> None:
    connector = object.__new__(KVWeaveConnector)
    saves = RunningSaves(lambda _: None, lambda _: None, 1)
    connector._scheduler = SimpleNamespace(saves=saves)
    state: Any = SimpleNamespace()
    number = saves.begin(SavedRange(state, 0, (64,)), {"group 0": TableSlice(0, np.array([1], np.int32))})
    seen = []
    for report in (WorkerReport(), WorkerReport(gathered={number: 1}), WorkerReport(ended={number: 1})):
        saves.report(report)
        seen.append((connector.has_pending_push_work(), connector.has_pending_block_frees()))
    assert seen == [(True, True), (True, False), (False, False)]


def test_a_stage_whose_memory_cannot_be_bound_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def of_all_stages(own: Any) -> list[Any]:
        told.append(own)
        return [own, None]

    monkeypatch.setattr(adapter, "of_all_stages", of_all_stages)
    connector = object.__new__(KVWeaveConnector)
    connector._config, connector._chunk_tokens, connector._groups = None, 64, ()
    for reason in (ValueError("gaps"), None):
        monkeypatch.setattr(adapter, "binder", lambda *_, reason=reason: Stage(reason))
        with pytest.raises(ValueError, match="gaps") if reason else pytest.raises(CannotServe, match="stage 1"):
            connector._bind([])
    assert told == [None, "spec"]


class Stage:
    """Binds, or fails to."""

    def __init__(self, reason: Exception | None) -> None:
        self.reason = reason

    def bind(self, *_: object) -> Any:
        if self.reason:
            raise self.reason
        return SimpleNamespace(spec="spec")
