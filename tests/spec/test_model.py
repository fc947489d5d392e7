"""Layer caches, layers and models: what they add up to, and what they may not say."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import SpecError, UnknownName
from kvweave.spec import (
    Chunk,
    DType,
    Full,
    Layer,
    LayerCache,
    ModelSpec,
    Read,
    Role,
    Segment,
    SinkWindow,
    State,
    Window,
)
from kvweave.spec.layer_spec import difference
from kvweave.spec.reach import tokens_needed
from tests import strategies

BF16 = DType.BFLOAT16
KEY, VALUE = (Role(name, (8, 128), BF16, token_axis=1, split=(Segment(8),)) for name in ("key", "value"))
FULL = LayerCache("full", Full(), (KEY, VALUE))
WINDOW = LayerCache("window", Window(128), (KEY, VALUE))
STATE = LayerCache("state", State(), (Role("ssm_state", (32, 128, 128), DType.FLOAT32),))
COMPRESSED = LayerCache("csa", Full(), (Role("compressed", (512,), BF16, tokens_per_row=4),))


# ---- bytes


def test_full_attention_grows_by_every_token() -> None:
    assert FULL.bytes_per_token() == 4096
    assert FULL.fixed_bytes() == 0
    assert [FULL.bytes_at(n) for n in (0, 1, 100)] == [0, 4096, 409600]


def test_a_window_stops_growing() -> None:
    assert WINDOW.bytes_per_token() == 0
    assert WINDOW.fixed_bytes() == 128 * 4096
    assert [WINDOW.bytes_at(n) // 4096 for n in (5, 127, 128, 10**6)] == [5, 127, 127, 127]


def test_a_chunk_starts_afresh_and_is_planned_at_its_fullest() -> None:
    chunk = replace(WINDOW, reach=Chunk(64))
    assert chunk.fixed_bytes() == 64 * 4096
    assert [chunk.bytes_at(n) // 4096 for n in (1, 63, 64, 65, 130)] == [1, 63, 0, 1, 2]


def test_sinks_stay_beside_the_window() -> None:
    sinks = replace(WINDOW, reach=SinkWindow(4, 128))
    assert sinks.fixed_bytes() == (4 + 128) * 4096
    assert [sinks.bytes_at(n) // 4096 for n in (2, 100, 131, 10**6)] == [2, 100, 131, 131]


def test_a_state_is_one_snapshot_whatever_the_length() -> None:
    assert STATE.bytes_per_token() == 0
    assert STATE.fixed_bytes() == 32 * 128 * 128 * 4
    assert [STATE.bytes_at(n) for n in (0, 1, 10**6)] == [0, 2097152, 2097152]


def test_tokens_that_share_a_row_pay_a_fraction_of_it() -> None:
    odd = LayerCache("hca", Full(), (Role("compressed", (584,), DType.UINT8, tokens_per_row=128),))
    assert COMPRESSED.bytes_per_token() == 256
    assert odd.bytes_per_token() == Fraction(584, 128)
    assert [COMPRESSED.bytes_at(n) for n in (3, 4, 7, 8)] == [0, 1024, 1024, 2048]


@given(strategies.caches(), st.integers(0, 400))
def test_bytes_at_a_length_are_those_of_whole_rows(cache: LayerCache, length: int) -> None:
    tokens = tokens_needed(cache.reach, length)
    rows = {
        role.name: tokens // role.tokens_per_row if cache.reach.per_token else min(tokens, 1) for role in cache.roles
    }
    assert cache.bytes_at(length) == sum(role.row_bytes * rows[role.name] for role in cache.roles)


@given(strategies.models())
def test_a_model_is_the_sum_of_its_caches(spec: ModelSpec) -> None:
    caches = [cache for layer in spec.layers for cache in layer.caches]
    assert spec.bytes_per_token() == sum((cache.bytes_per_token() for cache in caches), Fraction(0))
    assert spec.window_bytes() + spec.state_bytes() == sum(cache.fixed_bytes() for cache in caches)


def test_windows_and_states_are_told_apart() -> None:
    compressor = LayerCache("csa_state", Window(8), (Role("compressor_state", (2, 512), DType.FLOAT32),))
    spec = ModelSpec("mine", (Layer((FULL, WINDOW, STATE, compressor)),))
    assert spec.bytes_per_token() == 4096
    assert spec.window_bytes() == 128 * 4096
    assert spec.state_bytes() == 2097152 + 8 * 4096


# ---- tags are identity


def test_groups_are_tags_in_order_of_first_use() -> None:
    spec = ModelSpec("mine", (Layer((WINDOW,)), Layer((FULL, STATE)), Layer(), Layer((WINDOW,))))
    assert spec.groups() == {"window": (WINDOW, (0, 3)), "full": (FULL, (1,)), "state": (STATE, (1,))}


def test_draft_layers_are_not_the_models_own() -> None:
    spec = ModelSpec("mine", (Layer((FULL,)), Layer(), Layer((FULL,), draft=True)))
    assert (spec.num_layers, len(spec.layers)) == (2, 3)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(FULL, reach=Window(9)), ("reach", "Full()", "Window(tokens=9)")),
        (replace(FULL, kernel_tokens=8), ("kernel_tokens", "1", "8")),
        (replace(FULL, block_tokens=32), ("block_tokens", "None", "32")),
        (replace(FULL, context_split=True), ("context_split", "False", "True")),
        (replace(FULL, roles=(KEY,)), ("roles", "key, value", "key")),
        (replace(FULL, roles=(KEY, replace(VALUE, shape=(8, 64)))), ("role 'value' shape", "(8, 128)", "(8, 64)")),
    ],
)
def test_one_tag_for_two_layouts_names_layers_tag_field_and_both_values(
    other: LayerCache, words: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as error:
        ModelSpec("mine", (Layer((FULL,)), Layer(), Layer((other,))))
    for word in ("layers 0 and 2", "tag 'full'", *words):
        assert word in str(error.value)


@given(strategies.caches())
def test_equal_caches_differ_in_nothing(cache: LayerCache) -> None:
    assert difference(cache, replace(cache)) == "nothing"


def test_a_placeholder_that_contradicts_its_tag_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"tag 'full'.*reach"):
        ModelSpec("mine", (Layer((FULL,)),), placeholders=(replace(FULL, reach=Window(9)),))
    other = replace(STATE, roles=(replace(STATE.roles[0], shape=(1, 128, 128)),))
    with pytest.raises(SpecError, match=r"tag 'state'.*shape"):
        ModelSpec("mine", (Layer((FULL,)),), placeholders=(STATE, other))


def test_a_placeholder_whose_tag_is_kept_is_no_placeholder() -> None:
    assert ModelSpec("mine", (Layer((FULL,)),), placeholders=(FULL, STATE, STATE)) == ModelSpec(
        "mine", (Layer((FULL,)),), placeholders=(STATE,)
    )


# ---- what caches and layers may not say


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tag": ""}, ("needs a tag",)),
        ({"roles": ()}, ("cache 'full'", "at least one role")),
        ({"roles": (KEY, KEY)}, ("cache 'full'", "named twice: key")),
        ({"kernel_tokens": 0}, ("cache 'full'", "kernel_tokens", "at least 1", "0")),
        ({"kernel_tokens": 64, "block_tokens": 96}, ("cache 'full'", "block_tokens 96", "64")),
        ({"block_tokens": 0}, ("cache 'full'", "block_tokens 0")),
        (
            {"roles": (replace(KEY, tokens_per_row=4), replace(VALUE, tokens_per_row=6)), "block_tokens": 16},
            ("cache 'full'", "block_tokens 16", "12"),
        ),
        ({"reach": State(), "roles": (replace(KEY, tokens_per_row=4),)}, ("role 'key'", "4 tokens a row", "state")),
        ({"roles": (KEY, replace(KEY, name="value", alias_of="keys"))}, ("alias", "'keys'", "did you mean 'key'?")),
        (
            {"roles": (KEY, replace(KEY, name="value", shape=(4, 128), split=(), alias_of="key"))},
            ("cache 'full'", "role 'value'", "'key'", "equal"),
        ),
        (
            {"roles": (KEY, replace(KEY, name="value", alias_of="key"), replace(KEY, name="x", alias_of="value"))},
            ("cache 'full'", "role 'x'", "'value'"),
        ),
        ({"roles": (Role("key", (0, 128), BF16), Role("value", (8, 0), BF16))}, ("cache 'full'", "0 bytes")),
    ],
)
def test_a_cache_that_contradicts_itself_is_named(change: dict[str, Any], words: tuple[str, ...]) -> None:
    given: dict[str, Any] = {"tag": "full", "reach": Full(), "roles": (KEY, VALUE)}
    with pytest.raises(SpecError) as error:
        LayerCache(**{**given, **change})
    for word in words:
        assert word in str(error.value)


def test_a_zero_width_role_is_fine_beside_one_that_holds_bytes() -> None:
    """NoPE layers of Mistral Large 4 have a rope slice of width 0."""
    cache = LayerCache("latent", Full(), (Role("latent", (512,), BF16), Role("rope", (0,), BF16)))
    assert cache.bytes_per_token() == 1024


def test_a_layer_keeps_one_cache_a_tag() -> None:
    with pytest.raises(SpecError, match="several caches under one tag: full"):
        Layer((FULL, FULL))


def test_a_model_without_layers_is_an_error() -> None:
    with pytest.raises(SpecError, match="model 'mine' has no layers"):
        ModelSpec("mine", ())


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (Read(7, "full"), ("layer 1 reads layer 7", "0 to 1")),
        (Read(1, "full"), ("layer 1 reads layer 1",)),
        (Read(-1, "full"), ("layer 1 reads layer -1",)),
        (Read(0, "fll"), ("layer 1 reads layer 0", "'fll'", "did you mean 'full'?")),
        (Read(0, "full", ("keys",)), ("'keys'", "did you mean 'key'?")),
    ],
)
def test_a_read_of_what_is_not_there_names_both_layers(read: Read, words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as error:
        ModelSpec("mine", (Layer((FULL,)), Layer(reads=(read,))))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("own", "reads", "words"),
    [
        ((FULL,), (Read(0, "full"),), ("layer 2", "'key'", "'full'", "of layer 0 and its own")),
        ((FULL,), (Read(0, "full", ("value",)),), ("layer 2", "'value'", "of layer 0 and its own")),
        ((), (Read(0, "full"), Read(1, "full", ("value",))), ("layer 2", "'value'", "of layer 1 and of layer 0")),
    ],
)
def test_a_role_that_a_layer_would_have_twice_is_an_error(own: Any, reads: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as error:
        ModelSpec("mine", (Layer((FULL,)), Layer((FULL,)), Layer(own, reads)))
    for word in words:
        assert word in str(error.value)


def test_looking_up_a_tag_or_a_role_that_is_not_there_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"'ful'; did you mean 'full'\?"):
        Layer((FULL, STATE)).cache("ful")
    with pytest.raises(UnknownName, match=r"role of cache 'full' 'values'; did you mean 'value'\?"):
        FULL.role("values")


# ---- changes


def test_retagging_carries_the_reads_along() -> None:
    spec = ModelSpec("mine", (Layer((FULL,)), Layer(reads=(Read(0, "full"),))), placeholders=(STATE,))
    moved = spec.retag({"full": "draft.full", "state": "draft.state"})
    assert list(moved.groups()) == ["draft.full", "draft.state"]
    assert moved.layers[1].reads == (Read(0, "draft.full"),)
    assert moved.placeholders[0].tag == "draft.state"


@given(strategies.models())
def test_retagging_there_and_back_changes_nothing(spec: ModelSpec) -> None:
    there = {tag: f"x.{tag}" for tag in spec.groups()}
    assert spec.retag(there).retag({new: old for old, new in there.items()}) == spec


def test_some_layers_of_a_model_keep_their_numbers_and_all_its_groups() -> None:
    spec = ModelSpec("mine", (Layer((WINDOW,)), Layer((FULL,)), Layer((STATE,), draft=True)))
    part = spec.restrict({1})
    assert part.layers == (Layer(), Layer((FULL,)), Layer(draft=True))
    assert {tag: layers for tag, (_, layers) in part.groups().items()} == {"full": (1,), "window": (), "state": ()}
    with pytest.raises(SpecError, match="layer 2 reads the cache of layer 0, which is not kept"):
        ModelSpec("mine", (Layer((FULL,)), Layer(), Layer(reads=(Read(0, "full"),)))).restrict({2})
