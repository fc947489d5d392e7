"""Pasts by hand: followed where they can be, refused by name where not; in threads, copied, dropped, interrupted."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvweave.errors import BadCall, BadSequence
from kvweave.integrations.transformers import KVWeave
from tests.integrations.checks import CLOSE, IDS, SIX, check, check_unspoilt
from tests.integrations.models import difference, greedy, model_of, plain, prompt

parametrize = pytest.mark.parametrize("name", SIX)


@pytest.fixture
def weave(name: str) -> Iterator[KVWeave]:
    with KVWeave(model_of(name), "32MiB", rows=16, max_tokens=512) as made:
        yield made
        assert made.core.stats().sequences == 0, "a row was left open"


@parametrize
def test_a_past_goes_through_generate(name: str, weave: KVWeave) -> None:
    theirs = plain(weave.model, IDS)
    for generate in (weave.generate, weave.model.generate):
        with weave.past(IDS) as past:
            mask = torch.ones_like(IDS)
            ours = generate(IDS, attention_mask=mask, **{weave.served.cache_name: past}, **greedy(use_cache=True))
            assert difference(ours, theirs) < CLOSE
    check_unspoilt(weave)


def test_a_past_given_by_position() -> None:
    model, theirs = model_of("llama"), plain(model_of("llama"), IDS)
    with KVWeave(model, "16MiB") as weave, weave.past(IDS) as past, torch.no_grad():
        logits = model(IDS[:, -1:], None, None, past).logits
        assert (logits[:, -1] - theirs.logits[0]).abs().max() < CLOSE


# ---- a past where it cannot be followed


def inner(weave: KVWeave, past: Any) -> Any:
    return weave.model.base_model(IDS[:, -1:], **{weave.served.cache_name: past})


def around_the_hooks(weave: KVWeave, past: Any) -> Any:
    return weave.model.forward(IDS[:, -1:], **{weave.served.cache_name: past})


@parametrize
@pytest.mark.parametrize("call", [inner, around_the_hooks])
def test_a_past_where_the_hooks_do_not_run_is_refused(name: str, weave: KVWeave, call: Callable[..., Any]) -> None:
    with weave.past(IDS) as past, torch.no_grad(), pytest.raises(BadCall, match="where its hooks do not run"):
        call(weave, past)
    check_unspoilt(weave)


@parametrize
def test_a_past_after_the_end_is_refused(name: str) -> None:
    model = model_of(name)
    weave = KVWeave(model, "16MiB")
    past = weave.past(IDS)
    weave.close()
    with torch.no_grad(), pytest.raises(BadCall, match="whose KVWeave is closed"):
        model(IDS[:, -1:], use_cache=True, **{weave.served.cache_name: past})
    with pytest.raises(BadCall, match="this KVWeave is closed"):
        weave.generate(IDS)
    past.close()


def test_a_past_that_is_closed_or_has_failed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with KVWeave(model, "16MiB") as weave, torch.no_grad():
        answer = weave.generate(IDS, **greedy())
        with pytest.raises(BadSequence, match="this cache is closed"):
            model.generate(answer.sequences, past_key_values=answer.past_key_values, **greedy())
        with weave.past(IDS) as past:
            with monkeypatch.context() as patch:
                patch.setattr(model.model.layers[-1], "forward", None)
                with pytest.raises(TypeError):
                    model(IDS[:, -1:], past_key_values=past)
            with pytest.raises(BadSequence, match="a call of the model with this cache has failed"):
                model(IDS[:, -1:], past_key_values=past)
        check_unspoilt(weave)


@parametrize
def test_a_past_without_a_cache_is_a_contradiction(name: str, weave: KVWeave) -> None:
    options = {weave.served.cache_name: None, "use_cache": False}
    with weave.past(IDS) as past, torch.no_grad(), pytest.raises(BadCall, match="with use_cache=False"):
        weave.model(IDS[:, -1:], **{**options, weave.served.cache_name: past})
    check_unspoilt(weave)


def test_layers_that_were_skipped_make_no_past() -> None:
    model = model_of("opt")
    with KVWeave(model, "16MiB") as weave, torch.no_grad():
        decoder = model.model.decoder
        decoder.layerdrop = 1.0
        model.train()
        try:
            with pytest.raises(BadCall, match="has skipped layers"):
                weave.generate(IDS, **greedy())
        finally:
            decoder.layerdrop = 0.0
            model.eval()
        check_unspoilt(weave)


# ---- gradients, inference, interruptions


@parametrize
def test_a_call_with_gradients_gives_the_logits_and_no_gradients(name: str, weave: KVWeave) -> None:
    with weave.past(IDS) as past:
        logits = weave.model(IDS[:, -1:], use_cache=True, **{weave.served.cache_name: past}).logits
        assert not logits.requires_grad
        assert torch.is_grad_enabled()
    assert (logits[:, -1] - plain(weave.model, IDS).logits[0]).abs().max() < CLOSE
    assert not any(weave.arena.pool(pool.name).requires_grad for pool in weave.plan.pools)
    check_unspoilt(weave)


@parametrize
def test_pages_made_for_inference_are_used_outside_of_it(name: str) -> None:
    with torch.inference_mode():
        weave = KVWeave(model_of(name), "32MiB", rows=16, max_tokens=512)
        check(weave)
    with weave:
        check_unspoilt(weave)
        with torch.inference_mode():
            check_unspoilt(weave, prompt(33, seed=4))


def test_an_interrupted_call_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with KVWeave(model, "16MiB") as weave:
        for length in (1, 53):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(model.model.layers[-1], "forward", interrupt)
                weave.generate(prompt(length), **greedy())
        assert torch.is_grad_enabled()
        thread = Thread(target=check_unspoilt, args=(weave,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the core is still owned"


# ---- threads


@parametrize
def test_pasts_and_answers_in_many_threads(name: str, weave: KVWeave) -> None:
    prompts = [torch.cat([IDS[:, :32], prompt(9 + seed, seed=seed)], dim=1) for seed in range(4)]
    expected = [plain(weave.model, ids) for ids in prompts]
    wrong: list[object] = []

    def by_hand(number: int) -> None:
        ids, theirs = prompts[number], expected[number]
        with weave.past(ids) as past, torch.no_grad():
            for i, logits in enumerate(theirs.logits):
                token = theirs.sequences[:, ids.shape[1] - 1 + i : ids.shape[1] + i]
                out = weave.model(token, use_cache=True, **{weave.served.cache_name: past})
                if (out.logits[:, -1] - logits).abs().max() > CLOSE:
                    wrong.append((number, i))

    def generate(number: int) -> None:
        if difference(weave.generate(prompts[number], **greedy()), expected[number]) > CLOSE:
            wrong.append(number)

    def guarded(work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(error)

    threads = [
        Thread(target=guarded, args=(work, n)) for _ in range(3) for n in range(4) for work in (by_hand, generate)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    check_unspoilt(weave)


def test_a_past_waits_for_an_answer_in_another_thread() -> None:
    model, started, go_on = model_of("llama"), Event(), Event()

    def stop(*_: Any) -> None:
        started.set()
        assert go_on.wait(60)

    with KVWeave(model, "16MiB") as weave:
        with weave.past(IDS) as past:
            hook = model.model.layers[0].register_forward_pre_hook(stop)
            thread = Thread(target=weave.generate, args=(prompt(40, seed=3),), kwargs=greedy())
            thread.start()
            assert started.wait(60)
            hook.remove()
            go_on.set()
            with torch.no_grad():
                logits = model(IDS[:, -1:], past_key_values=past).logits
            thread.join(60)
        assert (logits[:, -1] - plain(model, IDS).logits[0]).abs().max() < CLOSE
        assert weave.core.stats().sequences == 0


# ---- what is dropped, copied, counted


def test_a_weave_that_was_dropped_is_collected_and_leaves_no_hook() -> None:
    model = copy.deepcopy(model_of("llama"))
    weave = KVWeave(model, "16MiB")
    weave.generate(IDS, **greedy())
    gone, memory = weakref.ref(weave), weakref.ref(weave.memory)
    del weave
    gc.collect()
    assert gone() is None
    assert memory() is None
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_rows_of_a_past_that_was_dropped_are_closed() -> None:
    with KVWeave(model_of("llama"), "16MiB") as weave:
        past = weave.past(IDS)
        assert weave.core.stats().sequences == 1
        del past
        gc.collect()
        check(weave)
        assert weave.core.stats().sequences == 0


@parametrize
def test_a_copy_of_a_model_is_a_model_without_pages(name: str, weave: KVWeave) -> None:
    check(weave)
    twin, file = copy.deepcopy(weave.model), io.BytesIO()
    torch.save(weave.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    theirs = plain(weave.model, IDS)
    for other in (twin, loaded):
        assert difference(plain(other, IDS), theirs) == 0
        with KVWeave(other, "16MiB") as own:
            check(own)
    check_unspoilt(weave)


# ---- pasts by hand, with inputs of one's own, and copies of them


def hidden_tokens(weave: KVWeave) -> dict[str, Any]:
    mask = torch.ones_like(IDS)
    mask[0, 7:30] = 0
    return {"attention_mask": mask}


def other_positions(weave: KVWeave) -> dict[str, Any]:
    return {"position_ids": torch.tensor([[90]])}


def four_axes(weave: KVWeave) -> dict[str, Any]:
    mask = torch.zeros(1, 1, 1, IDS.shape[1])
    mask[..., 3:20] = torch.finfo(torch.float32).min
    return {"attention_mask": mask}


@pytest.mark.parametrize("inputs", [hidden_tokens, other_positions, four_axes])
def test_what_is_computed_with_inputs_of_ones_own_is_for_nobody_else(inputs: Callable[..., Any]) -> None:
    """It is computed as asked, and not found by others: it depends on more than the tokens."""
    model = model_of("llama")
    with KVWeave(model, "16MiB", block_tokens=1) as weave, torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(IDS[:, :-1], past_key_values=cache)
        theirs = model(IDS[:, -1:], past_key_values=cache, **inputs(weave)).logits
        with weave.past(IDS) as past:
            ours = model(IDS[:, -1:], past_key_values=past, **inputs(weave)).logits
            assert (ours - theirs).abs().max() < CLOSE
            model(prompt(1, seed=4), past_key_values=past)
        check_unspoilt(weave, torch.cat([IDS, prompt(1, seed=4), prompt(8, seed=6)], dim=1))


def test_natural_inputs_by_hand_are_for_everybody() -> None:
    model = model_of("llama")
    with KVWeave(model, "16MiB", block_tokens=1) as weave, torch.no_grad():
        natural = {"attention_mask": torch.ones_like(IDS), "position_ids": torch.tensor([[IDS.shape[1] - 1]])}
        with weave.past(IDS) as past:
            model(IDS[:, -1:], past_key_values=past, **natural)
        check(weave, torch.cat([IDS, prompt(4, seed=6)], dim=1))
        assert weave.records[-1].reused_tokens == IDS.shape[1]


@parametrize
def test_a_copy_of_a_past_goes_its_own_way(name: str, weave: KVWeave) -> None:
    """As transformers' documentation has it: one prefix, copied for each prompt."""
    prompts = [torch.cat([IDS, prompt(6, seed=seed)], dim=1) for seed in (3, 4)]
    with weave.past(IDS) as past, torch.no_grad():
        for ids in prompts:
            with copy.deepcopy(past) as twin:
                options = {"attention_mask": torch.ones_like(ids), weave.served.cache_name: twin, "use_cache": True}
                assert difference(weave.model.generate(ids, **options, **greedy()), plain(weave.model, ids)) < CLOSE
        logits = weave.model(IDS[:, -1:], use_cache=True, **{weave.served.cache_name: past}).logits
        assert (logits[:, -1] - plain(weave.model, IDS).logits[0]).abs().max() < CLOSE
        with pytest.raises(BadCall, match="cannot be pickled"):
            torch.save(past, io.BytesIO())
    check_unspoilt(weave)
