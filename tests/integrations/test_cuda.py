"""On a GPU: what was stored there is found on a CPU, and the other way round, with equal tokens."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("xxhash", reason="the store needs xxhash")

from kvweave.store import DictTier
from tests.integrations.models import difference, greedy, model_of, plain, prompt
from tests.integrations.stores import CHUNK, chunk_of, started

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2"])
def test_a_store_serves_every_device(name: str) -> None:
    here = model_of(name)
    there = copy.deepcopy(here).to("cuda")
    chunk, ids = chunk_of(here), prompt(2 * CHUNK + 21)
    for first, then in ((here, there), (there, here), (there, there)):
        tier = DictTier()
        for model, found in ((first, 0), (then, 2 * chunk)):
            mine = ids.to(model.device)
            with started(model, tier, weights=None) as weave:
                assert difference(weave.generate(mine, **greedy(12)), plain(model, mine, num_tokens=12)) < 1e-3
                assert weave.records[-1].stored_tokens == found
