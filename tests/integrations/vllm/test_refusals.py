"""Engines that the connector refuses, by name, before they start."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.errors import CannotServe
from kvweave.integrations.vllm import adapter

pytestmark = pytest.mark.slow
DEGREES = ("decode_context_parallel_size", "prefill_context_parallel_size")


def config(method: str = "", degrees: Mapping[str, int] = MappingProxyType({})) -> Any:
    parallel = SimpleNamespace(**{**dict.fromkeys(DEGREES, 1), **degrees})
    drafts = SimpleNamespace(method=method) if method else None
    return SimpleNamespace(parallel_config=parallel, speculative_config=drafts)


@pytest.mark.parametrize("name", DEGREES)
def test_ranks_that_divide_tokens_are_refused(name: str) -> None:
    adapter.check_engine(config())
    with pytest.raises(CannotServe, match=f"{name}=2.*take 1"):
        adapter.check_engine(config(degrees={name: 2}))


def test_drafts_with_kv_of_their_own_are_refused() -> None:
    adapter.check_engine(config("ngram"))
    with pytest.raises(CannotServe, match="'eagle'.*take ngram"):
        adapter.check_engine(config("eagle"))


def test_a_version_that_was_never_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    with pytest.raises(CannotServe, match=r"vLLM 0\.33\.1.*known: 0\.32"):
        adapter.check_engine(config())
