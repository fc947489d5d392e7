"""What vLLM stored, `KVWeave` under transformers loads: full attention, windows, sinks, states. Of Llama-4 it finds
nothing: there vLLM's keys have their components in another order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.support import examine
from kvweave.store import DiskTier, Schema, Store, TierStack, weights_digest
from tests.integrations.vllm.engines import engine, tokens
from tests.integrations.vllm.models import CONFIGS

pytestmark = pytest.mark.slow
CHUNK, PARTS = 64, 8


def first_logprobs(model: Any, prompt: list[int], **options: Any) -> torch.Tensor:
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True,
        **options,
    )  # fmt: skip
    return torch.log_softmax(made.logits[0][0].float(), -1)


RESUMED = {**dict.fromkeys(CONFIGS, 640), "qwen3_next": 384, "llama4": 0}
"""Of 700 tokens: at vLLM's last block of all groups."""
TOLERANCE = {"qwen3_next": 0.05}
"""In bfloat16; else 1e-4, in float32."""


TUNED = {"override_generation_config": {"attn_temperature_tuning": True}}
"""Engines of no more than 32,768 tokens compute Llama-4 without the tuning that its config asks for, unless told so."""
OPTIONS: dict[str, dict[str, Any]] = {"llama4": TUNED}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_goes_on_from_what_vllm_stored(name: str, model: Callable[..., Path], tmp_path: Path) -> None:
    prompt, path = tokens(700), model(name)
    with engine(path, {"store": f"{tmp_path}:100MiB", "chunk_tokens": CHUNK}, **OPTIONS.get(name, {})) as writer:
        writer.one(prompt)
        writer.settle()
    loaded = getattr(transformers, CONFIGS[name][0]).from_pretrained(path, dtype="auto").eval()
    plain = first_logprobs(loaded, prompt)
    schema = Schema.of(examine(loaded).stored, chunk_tokens=CHUNK, parts=PARTS)
    with (
        Store(schema, TierStack(DiskTier(tmp_path, "100MiB"))) as store,
        KVWeave(loaded, "64MiB", store=store, weights=weights_digest(path)) as weave,
    ):
        found = first_logprobs(weave, prompt)
        record = weave.records[-1]
    assert record.stored_tokens == RESUMED[name]
    assert (found - plain).abs().max() < TOLERANCE.get(name, 1e-4)


def test_vllm_never_loads_rows_of_llama4_that_transformers_stored(model: Callable[..., Path], tmp_path: Path) -> None:
    """Their keys have another order of components: vLLM's rows of chunked layers must not be joined to full ones of
    transformers, whose shards have the same ids."""
    prompt, path = tokens(700), model("llama4")
    loaded = transformers.Llama4ForCausalLM.from_pretrained(path, dtype="auto").eval()
    schema = Schema.of(examine(loaded).stored, chunk_tokens=CHUNK, parts=PARTS)
    with (
        Store(schema, TierStack(DiskTier(tmp_path, "100MiB"))) as store,
        KVWeave(loaded, "64MiB", store=store, weights=weights_digest(path)) as weave,
    ):
        first_logprobs(weave, prompt)
        assert store.flush()
    with engine(path, {"store": f"{tmp_path}:100MiB", "chunk_tokens": CHUNK}, **TUNED) as made:
        computed = made.one(prompt)
        made.forget()
        found = made.one(prompt)
    assert found.cached == 640
    assert found.difference(computed) < 1e-4
