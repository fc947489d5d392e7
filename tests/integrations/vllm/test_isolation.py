"""Who shares with whom: salts, tenants, adapters, and what requests ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from tests.integrations.vllm.engines import Engine, engine, tokens
from tests.integrations.vllm.models import adapter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    store = {"store": f"{tmp_path_factory.mktemp('kv')}:100MiB"}
    with engine(model("llama"), store, enable_lora=True, max_lora_rank=8) as made:
        yield made


def test_requests_share_nothing_across_salts_and_tenants(served: Engine) -> None:
    prompt = tokens(400, seed=1)
    served.one(prompt, salt="a")
    served.forget()
    assert not served.one(prompt, salt="b").cached
    served.forget()
    assert not served.one(prompt).cached
    served.forget()
    assert not served.one(prompt, salt="a", params={"kvweave.tenant": "other"}).cached
    served.forget()
    assert served.one(prompt, salt="a").cached == 384


def test_a_request_may_be_neither_saved_nor_loaded(served: Engine) -> None:
    prompt = tokens(400, seed=2)
    served.one(prompt, params={"kvweave.skip_save": True})
    served.forget()
    assert not served.one(prompt, params={"kvweave.skip_load": True, "kvweave.nonsense": 1}).cached
    served.forget()
    assert served.one(prompt).cached == 384


def test_adapters_share_nothing_also_where_one_took_anothers_name(served: Engine, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    prompt = tokens(400, seed=3)
    first, second = adapter(tmp_path / "first", seed=1), adapter(tmp_path / "second", seed=2)
    answer = served.one(prompt, lora_request=LoRARequest("tuned", 1, str(first)))
    served.forget()
    assert not served.one(prompt).cached
    served.forget()
    other = served.one(prompt, lora_request=LoRARequest("tuned", 2, str(second)))
    assert not other.cached
    served.forget()
    again = served.one(prompt, lora_request=LoRARequest("tuned", 1, str(first)))
    assert again.cached == 384
    assert again.tokens == answer.tokens != other.tokens
