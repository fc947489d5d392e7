"""With a store prefixes survive the process, and every token is that of transformers, whatever happens to the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvweave.errors import Busy, StoreError, TierError, UnknownName
from kvweave.integrations.open_store import open_store
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.arena_payloads import ArenaPayloads
from kvweave.integrations.transformers.identity import Identity
from kvweave.integrations.transformers.model_changes import ModelChanges
from kvweave.integrations.transformers.prompts import Prompt
from kvweave.integrations.transformers.support import SCANS_AFRESH, examine
from kvweave.store import DictTier, MemoryTier, Schema, Store, TierPolicy, TierStack
from kvweave.store.redis_tier import RedisTier
from tests.integrations.models import difference, greedy, model_of, plain, prompt
from tests.integrations.stores import CHUNK, CLOSE, Damaged, chunk_of, leaving, open_store_of, started, store_of, use_of
from tests.integrations.test_families import SERVED, crowd, memory
from tests.integrations.test_modes import KINDS, TOGETHER, left_padded

MIX = (
    "full", "alibi", "window", "shared", "chunk", "latent", "indexed", "states", "states alone", "hybrid", "own cache",
    "sparse", "compressed",
)  # fmt: skip
FEW = ("full", "window", "states")


def equal(weave: KVWeave, ids: torch.Tensor, expected: Any = None) -> int:
    """Generate, compare with transformers, and return how many tokens came from the store."""
    answer = weave.generate(ids, **greedy())
    assert difference(answer, plain(weave.model, ids) if expected is None else expected) < CLOSE
    return weave.records[-1].stored_tokens


def parametrize(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds)


# ---- survival


def check_restart(name: str, blocks: tuple[int, int]) -> None:
    """Written with one size of blocks, read with another; then a prompt that leaves the first one's path."""
    model, tier = model_of(name), DictTier()
    chunk = chunk_of(model)
    ids = prompt(2 * chunk + 21)
    other = leaving(ids, chunk + 5)
    of_ids, of_other = plain(model, ids), plain(model, other)
    room = 8 * memory(model, 64, ids.shape[1] + 8)[0]
    with started(model, tier, room, block_tokens=blocks[0]) as weave:
        assert equal(weave, ids, of_ids) == 0
    with started(model, tier, room, block_tokens=blocks[1]) as weave, poisoned_loads(weave):
        assert equal(weave, ids, of_ids) == 2 * chunk
        equal(weave, other, of_other)
    with started(model, tier, room, block_tokens=blocks[0]) as weave:
        assert equal(weave, other, of_other) == 2 * chunk
        equal(weave, leaving(ids, chunk + 9, seed=8))
        assert weave.records[-1].reused_tokens >= chunk, "where prompts part is a point to go on from"


@contextmanager
def poisoned_loads(weave: KVWeave) -> Iterator[None]:
    """Loads leave NaN in the columns of convolutions that the store does not have: nothing may read them."""
    real = ArenaPayloads.sink

    def poisoned(payloads: ArenaPayloads, sequence: Any) -> Any:
        for (number, cache), (_, kept) in zip(weave.served.spec.caches(), weave.served.stored.caches(), strict=True):
            for role, less in zip(cache.roles, kept.roles, strict=True):
                if role != less:
                    pages = weave.memory.arena.layer(number, cache.tag)[role.name]
                    pages[weave.core.table(cache.tag)[sequence.row][0], ..., : -less.shape[-1]] = torch.nan
        return real(payloads, sequence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArenaPayloads, "sink", poisoned)
        yield


@parametrize(*MIX)
def test_after_a_restart_prompts_are_found_and_every_token_is_equal(kind: str) -> None:
    check_restart(KINDS[kind], (16, 64))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SERVED if name not in SCANS_AFRESH])
def test_every_family_survives_a_restart(name: str) -> None:
    check_restart(name, (64, 16))


@parametrize(*[kind for kind in MIX if kind not in TOGETHER])
def test_a_padded_batch_after_a_restart(kind: str) -> None:
    """Rows hit at different lengths; one is shorter than a chunk."""
    model, tier = model_of(KINDS[kind]), DictTier()
    ids, mask = left_padded((2 * CHUNK + 9, 7, CHUNK + 30))
    theirs = plain(model, ids, mask)
    for restarted in (False, True):
        with started(model, tier, block_tokens=16) as weave:
            assert difference(weave.generate(ids, attention_mask=mask, **greedy()), theirs) < CLOSE
            assert weave.records[-1].stored_tokens >= 2 * CHUNK * restarted
            assert weave.records[-1].reused_tokens >= 3 * CHUNK * restarted


@parametrize(*FEW)
def test_beams_after_a_restart(kind: str) -> None:
    model, tier = model_of(KINDS[kind]), DictTier()
    ids, options = prompt(2 * CHUNK - 5), greedy(12, num_beams=3, num_return_sequences=2)
    theirs = plain(model, ids, num_tokens=12, num_beams=3, num_return_sequences=2)
    for _ in range(2):
        with started(model, tier) as weave:
            assert torch.equal(weave.generate(ids, **options).sequences, theirs.sequences)
    assert weave.records[-1].stored_tokens == CHUNK
    with started(model, tier) as weave:
        assert equal(weave, theirs.sequences[:1]) == 2 * CHUNK, "the best beam's answer is found"


@parametrize("full", "window", "states", "states alone", "hybrid", "compressed")
def test_a_next_turn_after_a_restart_finds_the_answer(kind: str) -> None:
    model, tier = model_of(KINDS[kind]), DictTier()
    chunk = chunk_of(model)
    said = prompt(2 * chunk - 5)
    for turn in range(2):
        with started(model, tier) as weave:
            answer = weave.generate(said, attention_mask=torch.ones_like(said), **greedy(10)).sequences
            assert torch.equal(answer, plain(model, said, num_tokens=10).sequences)
            assert weave.records[-1].stored_tokens == 2 * chunk * turn
        said = torch.cat([answer, prompt(20, seed=turn)], dim=1)


@parametrize(*FEW)
def test_a_past_by_hand_is_found_and_kept_too(kind: str) -> None:
    model, tier = model_of(KINDS[kind]), DictTier()
    ids = prompt(2 * CHUNK + 9)
    expected = plain(model, ids).logits[0]
    for _ in range(2):
        with started(model, tier) as weave, weave.past(ids) as past, torch.no_grad():
            logits = model(ids[:, -1:], past_key_values=past).logits
            assert (logits[:, -1] - expected).abs().max() < CLOSE
        assert weave.stats().stored_tokens == 0, "a past by hand is no record"
    assert past.store_batch is not None
    assert past.store_batch.num_loaded == 2 * CHUNK


@pytest.mark.parametrize("window", [5, 24, 63, 64, 65, 100])
def test_half_a_chunk_is_never_taken_for_a_whole_one(window: int) -> None:
    """What a window holds at the end of one chunk begins within another, of which a shorter prompt needs all."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
                           num_attention_heads=2, num_key_value_heads=1, sliding_window=window)  # fmt: skip
    model, tier = MistralForCausalLM(config).eval(), DictTier()
    ids = prompt(4 * CHUNK + 9)
    for length in (265, 137, 201, 140, 206, 90):
        with started(model, tier, block_tokens=1) as weave:
            equal(weave, ids[:, :length])
    for length in (137, 201, 265):
        with started(model, tier) as weave:
            assert equal(weave, ids[:, :length]) == length // CHUNK * CHUNK


# ---- memory, and time


@parametrize(*FEW)
def test_what_others_pushed_out_of_memory_comes_back_from_the_store(kind: str) -> None:
    model, tier = model_of(KINDS[kind]), DictTier()
    ids = prompt(3 * CHUNK + 20)
    expected = plain(model, ids)
    with started(model, tier, 4 * memory(model, 16, ids.shape[1] + 80)[0], block_tokens=16) as weave:
        equal(weave, ids, expected)
        crowd(weave.core, ids.shape[1])
        assert equal(weave, ids, expected) == 3 * CHUNK


def test_what_cannot_be_had_for_want_of_pages_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvweave.errors import OutOfPages

    model, tier, ids = model_of("llama"), DictTier(), prompt(2 * CHUNK + 9)
    with started(model, tier) as weave:
        equal(weave, ids)
    with started(model, tier) as weave:

        def refuse(*_: object) -> None:
            raise OutOfPages("shared", [])

        monkeypatch.setattr(weave.core, "load_to", refuse)
        assert equal(weave, ids) == 0
        assert (use_of(weave).no_room, use_of(weave).failed) == (1, 0)


def test_what_is_there_is_not_asked_for_nor_saved_again() -> None:
    model, tier, ids = model_of("qwen3_next"), DictTier(), prompt(2 * CHUNK + 9)
    with started(model, tier) as weave:
        for _ in range(3):
            equal(weave, ids)
        use = use_of(weave)
        assert (use.lookups, use.saves) == (1, 1)
    before = dict(tier.blobs)
    with started(model, tier) as weave:
        equal(weave, ids)
        assert (use_of(weave).saves, use_of(weave).stored) == (0, 0)
    assert tier.blobs == before


def test_points_on_the_way_through_a_prompt_are_where_a_store_can_have_them() -> None:
    for name in ("gemma3_text", "qwen3_next"):
        with started(model_of(name), DictTier()) as weave, KVWeave(model_of(name), "16MiB") as without:
            assert weave.core.spacing.tokens % CHUNK == 0
            assert without.core.spacing.widens == weave.core.spacing.widens


def test_points_on_the_way_are_far_apart_once_the_store_is_full() -> None:
    model, ids = model_of("qwen3_next"), prompt(2 * CHUNK + 9)
    with started(model, MemoryTier("64MiB")) as weave:
        equal(weave, ids)
        one = open_store_of(weave).stats().tiers[0].tier.used_bytes
        close = spaced(weave)
    with started(model, MemoryTier(2 * one)) as weave:
        for seed in range(1, 4):
            assert spaced(weave) == close
            equal(weave, prompt(2 * CHUNK + 9, seed=seed))
        assert spaced(weave) == [8192, 16384]


def test_a_first_sibling_finds_a_point_in_the_store_after_a_restart_though_memory_was_full() -> None:
    model, tier = model_of("qwen3_next"), MemoryTier("256MiB")
    with started(model, DictTier()) as weave:
        (point, *_), room = spaced(weave), memory(model, 64, 2048)[0]
    ids = prompt(point + 2 * CHUNK)
    with started(model, tier, room) as weave:
        for seed in range(4, 16):
            weave.generate(prompt(point, seed=seed), **greedy())
        assert weave.core.stats().evicted_pages
        weave.generate(ids, **greedy())
    with started(model, tier) as weave:
        assert equal(weave, leaving(ids, point + 5)) == point


def spaced(weave: KVWeave) -> list[int]:
    """Where a prompt of 20,000 tokens leaves points on its way."""
    assert weave._store_sync is not None
    return weave._store_sync.spaced(0, 20_000)


class Slow(DictTier):
    """Answers nothing within an hour."""

    asleep = False

    def contains(self, keys: Any) -> Any:
        while self.asleep:
            time.sleep(0.01)
        return super().contains(keys)


class Broken(DictTier):
    def contains(self, keys: Any) -> Any:
        raise TierError("the cable was pulled")

    def put(self, keys: Any, blobs: Any) -> Any:
        raise TierError("the cable was pulled")


def test_a_store_that_hangs_costs_its_deadline_and_no_token() -> None:
    model, tier, ids = model_of("qwen3_next"), Slow(), prompt(2 * CHUNK + 9)
    expected = plain(model, ids)
    tier.asleep = True
    with started(model, tier, store=store_of(model, tier, TierPolicy(deadline_s=30)), store_wait_s=0.2) as weave:
        start = time.perf_counter()
        assert equal(weave, ids, expected) == 0
        assert time.perf_counter() - start < 3
        assert sum(executor.late for executor in open_store_of(weave).stats().tiers) == 2
        tier.asleep = False


def test_a_store_that_fails_is_counted_and_no_token_is_lost() -> None:
    model, ids = model_of("llama"), prompt(2 * CHUNK + 9)
    with started(model, Broken()) as weave:
        assert equal(weave, ids) == 0
        assert use_of(weave).dropped > 0, "what no tier answered for is not called present"
        assert open_store_of(weave).stats().tiers[0].failed > 0


def test_a_store_that_raises_is_counted_and_no_token_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("no")

    for method in ("lookup", "load", "save"):
        model, tier, ids = model_of("qwen3_next"), DictTier(), prompt(2 * CHUNK + 9)
        with started(model, tier) as weave:
            equal(weave, ids)
        if method == "save":
            tier.blobs.clear()
        with started(model, tier) as weave:
            monkeypatch.setattr(open_store_of(weave), method, fail)
            assert equal(weave, ids) == 0
            assert use_of(weave).failed > 0
        monkeypatch.undo()


# ---- damage


@parametrize(*FEW, "compressed")
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_damaged_blobs_are_misses_and_replaced(kind: str, every: int) -> None:
    model, tier = model_of(KINDS[kind]), DictTier()
    chunk = chunk_of(model)
    ids = prompt(3 * chunk + 9)
    expected = plain(model, ids)
    with started(model, tier) as weave:
        equal(weave, ids, expected)
    damaged = Damaged(tier.blobs, every)
    with started(model, damaged) as weave:
        equal(weave, ids, expected)
        assert use_of(weave).shortened > 0
        assert sum(executor.damaged for executor in open_store_of(weave).stats().tiers) > 0
    with started(model, damaged) as weave:
        assert equal(weave, ids, expected) == 3 * chunk


def test_a_byte_that_changed_on_disk_is_a_miss(tmp_path: Path) -> None:
    model, ids = model_of("gemma3_text"), prompt(530)
    expected = plain(model, ids)
    options: dict[str, Any] = {"rows": 8, "max_tokens": 1024, "store": tmp_path, "weights": "these"}
    with KVWeave(model, "64MiB", **options) as weave:
        equal(weave, ids, expected)
    blobs = tmp_path / "blobs-0"
    data = bytearray(blobs.read_bytes())
    for at in range(5000, len(data), 20_000):
        data[at] ^= 1
    blobs.write_bytes(data)
    with KVWeave(model, "64MiB", **options) as weave:
        assert equal(weave, ids, expected) < 512
        assert use_of(weave).shortened > 0
    with KVWeave(model, "64MiB", **options) as weave:
        assert equal(weave, ids, expected) == 512


# ---- who may share


def test_other_weights_never_meet() -> None:
    model, tier, ids = model_of("llama"), DictTier(), prompt(2 * CHUNK + 9)
    with started(model, tier, weights=None) as weave:
        equal(weave, ids)
        parameter = next(model.parameters())
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter[7, 0] += 0.25
        assert equal(weave, ids) == 0, "weights that changed are seen"
        assert weave.records[-1].reused_tokens == 0
    with started(model, tier, weights=None) as weave:
        assert equal(weave, ids) == 2 * CHUNK
    with torch.no_grad():
        parameter.copy_(kept)
    with started(model, tier, weights=None) as weave:
        assert equal(weave, ids) == 2 * CHUNK, "the first weights again"


def test_other_configs_and_named_weights_never_meet() -> None:
    model, tier, ids = model_of("llama"), DictTier(), prompt(2 * CHUNK + 9)
    with started(model, tier, weights="one") as weave:
        equal(weave, ids)
    with started(model, tier, weights="other") as weave:
        assert equal(weave, ids) == 0
    eps, model.config.rms_norm_eps = model.config.rms_norm_eps, 0.5
    try:
        with started(model, tier, weights="one") as weave:
            assert weave.generate(ids, **greedy()) is not None
            assert weave.records[-1].stored_tokens == 0
    finally:
        model.config.rms_norm_eps = eps


def test_where_a_model_came_from_is_no_matter(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model, tier, ids = model_of("llama"), DictTier(), prompt(2 * CHUNK + 9)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    with started(model, tier, weights=None) as weave:
        equal(weave, ids)
    with started(loaded, tier, weights=None) as weave:
        assert equal(weave, ids) == 2 * CHUNK


def test_namespaces_never_meet_and_mean_the_same_after_a_restart() -> None:
    model, tier, ids = model_of("llama"), DictTier(), prompt(2 * CHUNK + 9)
    names: list[Any] = ["one", "other", 1, ("one", 2), ("one", (2, b"x", None)), "\0('one', 2)x"]
    for found in (0, 2 * CHUNK):
        with started(model, tier) as weave:
            for name in names:
                weave.generate(ids, namespace=name, **greedy())
                assert weave.records[-1].stored_tokens == found, name
            with pytest.raises(StoreError, match="a namespace of a store is text"):
                weave.generate(ids, namespace=frozenset("x"), **greedy())


def test_adapters_in_use_keep_what_they_computed_apart() -> None:
    model, tier, ids = model_of("llama"), DictTier(), prompt(2 * CHUNK + 9)
    layer: Any = model.get_decoder().layers[0].mlp.down_proj
    try:
        for active in (["a"], ["b"], []):
            layer.active_adapters = active
            with started(model, tier) as weave:
                assert equal(weave, ids) == 0
        layer.active_adapters = ["b"]
        with started(model, tier) as weave:
            assert equal(weave, ids) == 2 * CHUNK
    finally:
        del layer.active_adapters


def test_weights_that_cannot_be_read_are_to_be_named() -> None:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(model_of("llama").config)
    with pytest.raises(StoreError, match="weights=NAME"):
        KVWeave(model, "16MiB", store=store_of(model, DictTier()))


# ---- places


def test_a_store_that_is_open_must_be_for_this_model_and_stays_open() -> None:
    llama, other = model_of("llama"), model_of("gemma3_text")
    tier = DictTier()
    with pytest.raises(StoreError, match="open for another model"):
        KVWeave(other, "16MiB", store=store_of(llama, tier))
    uneven = Store(Schema.of(examine(llama).stored, chunk_tokens=40), TierStack(tier))
    with pytest.raises(StoreError, match="chunks of 40 tokens, which blocks of 16 do not divide"):
        KVWeave(llama, "16MiB", store=uneven)
    store = store_of(llama, tier)
    with KVWeave(llama, "16MiB", store=store) as weave:
        weave.generate(prompt(CHUNK + 9), **greedy())
    mine = Identity(llama, examine(llama).stored, ModelChanges(llama)).namespace(Prompt(prompt(1)[0].numpy()))
    hit = store.lookup(store.prompt(prompt(CHUNK + 9)[0].numpy(), mine))
    assert hit.position == CHUNK


def test_a_directory_is_closed_with_what_opened_it_and_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    model = model_of("llama")
    with KVWeave(model, "16MiB", store=f"{tmp_path / 'kv'}:1MiB") as weave:
        tier = open_store_of(weave).tier_stack.executors[0].tier
        assert tier.stats().capacity_bytes == 1 << 20
        with pytest.raises(Busy):
            KVWeave(model, "16MiB", store=tmp_path / "kv")
    KVWeave(model, "16MiB", store=tmp_path / "kv").close()


def test_a_memory_that_cannot_be_had_leaves_the_directory_free(tmp_path: Path) -> None:
    model = model_of("llama")
    with pytest.raises(Exception, match="rows"):
        KVWeave(model, "16MiB", store=tmp_path, rows=0)
    KVWeave(model, "16MiB", store=tmp_path).close()


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("llama"), prompt(270)
    for found in (0, 256):
        with KVWeave(model, "16MiB", store=f"file://{tmp_path}") as weave:
            assert equal(weave, ids) == found
    schema = Schema.of(examine(model).stored)
    with pytest.raises(UnknownName, match="did you mean 's3'"):
        open_store("s33://bucket", schema)
    store = open_store("redis://nobody.invalid:1", schema)
    assert isinstance(store.tier_stack.executors[1].tier, RedisTier)  # type: ignore[attr-defined]
    store.close()


def test_a_model_that_gains_nothing_declines_and_says_why() -> None:
    model, tier = model_of("jamba"), DictTier()
    with started(model, tier) as weave:
        equal(weave, prompt(CHUNK + 9))
        assert "token by token" in weave.stats().store_declined
        assert weave.stats().store is None
    assert not tier.blobs
