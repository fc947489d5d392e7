"""How prompts are cut into forwards: into no more than it takes, for each costs a reading of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.paged_rows import BlockRun, RowSlots
from kvweave.integrations.transformers.prefill import UNCUT, UNCUT_SCAN, retention
from tests.integrations.checks import CLOSE, SIX
from tests.integrations.models import NEW_TOKENS, difference, greedy, model_of, plain, prompt


class Forwards(list[int]):
    """The tokens of a row in each forward of a model."""

    changes_no_answer = True
    """Says to a `ModelChanges` that the model is the same with this hook."""

    def see(self, _: Any, __: Any, named: dict[str, Any]) -> None:
        self.append(named["input_ids"].shape[1])


def check(weave: KVWeave, ids: torch.Tensor, **options: Any) -> list[int]:
    """Generate as transformers does; returns the tokens of each forward."""
    theirs = plain(weave.model, ids, **options)
    forwards = Forwards()
    hook = weave.model.register_forward_pre_hook(forwards.see, with_kwargs=True)
    assert difference(weave.generate(ids, **greedy(**options)), theirs) < CLOSE
    hook.remove()
    return forwards


@pytest.mark.parametrize("name", [*SIX, "mamba"])
def test_a_cold_prompt_of_64_tokens_takes_the_forwards_of_transformers(name: str) -> None:
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        assert check(weave, prompt(64)) == [64] + [1] * (NEW_TOKENS - 1)


@pytest.mark.parametrize(("name", "uncut"), [("qwen3_next", UNCUT), ("mamba", UNCUT_SCAN)])
def test_a_longer_prompt_is_cut_where_a_state_is_to_be_kept_and_found_again(name: str, uncut: int) -> None:
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        last = uncut // 16 * 16
        for _ in range(2):
            forwards = check(weave, prompt(uncut + 4))
        assert weave.records[0].reused_tokens == 0
        assert weave.records[1].reused_tokens == last
        assert sum(forwards) == 4 + NEW_TOKENS - 1


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_a_retention_of_ones_own_is_kept_in_short_prompts_too(name: str) -> None:
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        own = retention(weave.served)
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512, retention=own) as weave:
        check(weave, prompt(37))
        check(weave, prompt(37))
        assert weave.records[-1].reused_tokens == 32


@pytest.mark.parametrize("name", SIX)
def test_what_follows_a_hit_is_one_forward(name: str) -> None:
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        weave.remember(prompt(96))
        ids = torch.cat([prompt(96), prompt(20, seed=1)], dim=1)
        assert check(weave, ids) == [20] + [1] * (NEW_TOKENS - 1)


def test_what_is_left_may_be_longer_than_what_was_found() -> None:
    with KVWeave(model_of("llama"), "32MiB", rows=8, max_tokens=512) as weave:
        weave.remember(prompt(16))
        assert check(weave, torch.cat([prompt(16), prompt(40, seed=1)], dim=1))[0] == 40


@pytest.mark.parametrize("name", SIX)
def test_cold_prompts_of_one_length_are_one_forward_and_found_again(name: str) -> None:
    ids = torch.cat([prompt(64, seed) for seed in range(3)])
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        assert check(weave, ids) == [64] + [1] * (NEW_TOKENS - 1)
        for row in ids:
            check(weave, torch.cat([row[None], prompt(30, seed=9)], dim=1))
        assert weave.core.stats().sequences == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_rows_that_begin_alike_are_computed_one_after_the_other(name: str) -> None:
    ids = torch.cat([torch.cat([prompt(64), prompt(9, seed)], dim=1) for seed in (1, 2, 3)])
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        check(weave, ids)
        assert weave.records[-1].reused_tokens == 2 * 64


def test_a_forward_is_no_longer_than_was_asked_for() -> None:
    with KVWeave(model_of("llama"), "32MiB", rows=8, max_tokens=512, prefill_tokens=40) as weave:
        assert check(weave, prompt(100)) == [40, 40, 20] + [1] * (NEW_TOKENS - 1)
        assert max(check(weave, torch.cat([prompt(30, seed) for seed in (1, 2)]))) == 29


def test_beams_share_the_prompt_and_compute_its_last_token_each() -> None:
    with KVWeave(model_of("gemma3_text"), "32MiB", rows=16, max_tokens=512) as weave:
        assert check(weave, prompt(64), num_beams=3)[:2] == [63, 1]


@pytest.mark.parametrize(("pads", "kind"), [((0, 0), BlockRun), ((0, 32), BlockRun), ((0, 5), RowSlots)])
def test_rows_as_deep_in_their_blocks_are_read_by_whole_blocks_and_are_the_same(pads: Any, kind: type) -> None:
    ids = torch.cat([prompt(90, seed) for seed in (1, 2)])
    mask = torch.ones_like(ids)
    mask[1, : pads[1]] = 0
    with KVWeave(model_of("gemma3_text"), "32MiB", rows=8, max_tokens=512) as weave, weave.past(ids, mask) as past:
        for layer in past.layers:
            first = layer._first(past.columns)
            for start in (first, first + 7):
                places = past._step.places(layer.tag, start, past.columns)
                single = past._step.cells(layer.tag, start, past.columns)
                assert type(places) is kind
                for one, other in zip(layer.kept.read(places), layer.kept.read(single), strict=True):
                    assert torch.equal(one, other)
