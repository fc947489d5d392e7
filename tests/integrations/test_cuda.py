"""On a GPU: every way to call gives the answer of transformers there, and a store serves both kinds of devices.

Run: pytest tests/integrations/test_cuda.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("xxhash", reason="the store needs xxhash")

from kvweave.integrations.transformers import KVWeave, attach, detach
from kvweave.store import DictTier
from tests.integrations.checks import SIX
from tests.integrations.models import difference, greedy, model_of, plain, prompt
from tests.integrations.stores import CHUNK, chunk_of, started

DEVICE = "cuda"
CLOSE = 1e-3
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
parametrize = pytest.mark.parametrize("name", SIX)


def on_device(name: str) -> Any:
    return copy.deepcopy(model_of(name)).to(DEVICE)


def tokens(length: int, *seeds: int) -> torch.Tensor:
    return torch.cat([prompt(length, seed) for seed in seeds or (0,)]).to(DEVICE)


def check(weave: KVWeave, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> int:
    """Generate as transformers does there; returns the tokens that were found."""
    mask = torch.ones_like(ids) if mask is None else mask
    ours = weave.generate(ids, attention_mask=mask, **greedy(**options))
    assert difference(ours, plain(weave.model, ids, mask, **options)) < CLOSE
    return weave.records[-1].reused_tokens


@parametrize
def test_prompts_batches_and_beams(name: str) -> None:
    with KVWeave(on_device(name), "256MiB", prefill_tokens=128) as weave:
        assert weave.arena.memory.device.type == DEVICE
        assert [check(weave, tokens(300)) > 0 for _ in range(2)] == [False, True]
        check(weave, tokens(300, 1, 2, 3))
        check(weave, torch.cat([tokens(200), tokens(9, 4)], dim=1))
        padded = torch.nn.functional.pad(tokens(70, 5), (30, 0))
        ids = torch.cat([padded, tokens(100, 6)])
        check(weave, ids, (ids != 0).long())
        check(weave, ids, (ids != 0).float())
        check(weave, tokens(90, 7), num_beams=3)
        assert weave.core.stats().sequences == 0


@parametrize
def test_what_is_remembered_a_conversation_and_a_past_by_hand(name: str) -> None:
    with KVWeave(on_device(name), "256MiB") as weave, torch.no_grad():
        weave.remember(tokens(160))
        ids = torch.cat([tokens(160), tokens(9, 1)], dim=1)
        assert check(weave, ids) == 160
        with weave.past(ids) as past:
            logits = weave.model(ids[:, -1:], **{weave.served.cache_name: past}).logits
        assert (logits[0, -1] - plain(weave.model, ids).logits[0][0]).abs().max() < CLOSE
        session = weave.session()
        for seed in (2, 3):
            session.generate(tokens(80, seed), max_new_tokens=20, min_new_tokens=20, do_sample=False)
        assert weave.records[-1].reused_tokens >= 80


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_attached_model_of_half_precision_and_the_way_back(dtype: torch.dtype) -> None:
    model, ids = on_device("llama").to(dtype), tokens(300)
    theirs = plain(model, ids).sequences
    weave = attach(model, "256MiB")
    assert all(torch.equal(plain(model, ids).sequences, theirs) for _ in range(2))
    assert weave.records[-1].reused_tokens == 288
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **greedy()).sequences, theirs)
    detach(model)
    assert torch.equal(plain(model, ids).sequences, theirs)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2"])
def test_a_store_serves_every_device(name: str) -> None:
    here = model_of(name)
    there = on_device(name)
    chunk, ids = chunk_of(here), prompt(2 * CHUNK + 21)
    for first, then in ((here, there), (there, here), (there, there)):
        tier = DictTier()
        for model, found in ((first, 0), (then, 2 * chunk)):
            mine = ids.to(model.device)
            with started(model, tier, weights=None) as weave:
                assert difference(weave.generate(mine, **greedy(12)), plain(model, mine, num_tokens=12)) < CLOSE
                assert weave.records[-1].stored_tokens == found
