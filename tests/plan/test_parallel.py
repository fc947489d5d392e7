"""Shards: every rank's plan is a part of the model, and the parts make the whole."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import Parallel, from_config, make_plan
from kvweave.errors import PlanError
from kvweave.plan.parallel import shard
from kvweave.spec import (
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
from tests import strategies

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 10,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
LLAMA = from_config(CONFIG)


# ---- tensor parallelism


def distinct(role: Role, ranks: int) -> Fraction:
    """Bytes of the first axis that the distinct shards of each run hold together, times the rest of the row."""
    mine = role.shard(ranks)
    entries = Fraction(0)
    for whole, part in zip(role.split, mine.split, strict=True):
        copies = Fraction(ranks * part.units, whole.units) if whole.units else Fraction(1)  # how often each is held
        entries += ranks * part.units * part.width / copies if whole.units else 0
    return entries * role.row_bytes / role.shape[0] if role.split else Fraction(mine.row_bytes)


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 30, 96])
def test_the_shards_of_a_role_add_up_to_the_whole(heads: int, ranks: int) -> None:
    role = Role("key", (heads * 3, 7), DType.FLOAT32, split=(Segment(heads, 3),))
    mine = role.shard(ranks)
    held = [head for rank in range(ranks) for head in heads_of(heads, ranks, rank)]
    assert set(held) == set(range(heads))
    assert len(held) * 3 * 7 * 4 == ranks * mine.row_bytes
    assert len(set(map(held.count, held))) == 1, "replicas are equal"


def heads_of(heads: int, ranks: int, rank: int) -> range:
    """The heads of one rank: each keeps as many as the shard says, ranks in groups of replicas."""
    each = Role("key", (heads,), DType.UINT8, split=(Segment(heads),)).shard(ranks).shape[0]
    first = rank // (ranks * each // heads) * each
    return range(first, first + each)


@given(strategies.models(), st.integers(1, 16))
def test_the_shards_of_a_model_add_up_to_the_whole(spec: ModelSpec, ranks: int) -> None:
    mine = shard(spec, Parallel(tp=ranks, tp_rank=ranks - 1))
    assert mine == shard(spec, Parallel(tp=ranks)), "replicas are equal"
    for (_, whole), (_, part) in zip(spec.caches(), mine.caches(), strict=True):
        assert (part.tag, part.reach) == (whole.tag, whole.reach)
        for before, after in zip(whole.roles, part.roles, strict=True):
            assert after == before.shard(ranks)
            assert distinct(before, ranks) == before.row_bytes


@pytest.mark.parametrize(("tp", "bytes_per_token"), [(1, 40960), (2, 20480), (8, 5120), (16, 5120), (3, 40960)])
def test_a_rank_keeps_its_heads(tp: int, bytes_per_token: int) -> None:
    made = make_plan(LLAMA, "1GiB", parallel=Parallel(tp=tp, tp_rank=tp - 1))
    assert made.bytes_per_token() == bytes_per_token
    assert made.parallel == Parallel(tp=tp, tp_rank=tp - 1)


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        (3, "not divided by tp 3: each rank keeps all of them, and each is on 3 ranks; tp of 2, 4, 8 divides them"),
        (12, "not divided by tp 12: each rank keeps 2 of them, and each is on 3 ranks"),
        (16, "fewer than the 16 tp ranks: each rank keeps 1, and each is on 2 ranks"),
    ],
)
def test_a_plan_says_what_its_ranks_do_not_divide(tp: int, words: str) -> None:
    (note,) = make_plan(LLAMA, "1GiB", parallel=Parallel(tp=tp)).notes
    assert note.startswith("group 'full': the 8 heads or groups of key, value are ")
    assert words in note


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_plan_has_nothing_to_say_of_ranks_that_divide_its_heads(tp: int) -> None:
    assert make_plan(LLAMA, "1GiB", parallel=Parallel(tp=tp)).notes == ()


def test_latents_are_on_every_rank() -> None:
    latent = from_config({**CONFIG, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    made = make_plan(latent, "1GiB", parallel=Parallel(tp=8))
    assert made.bytes_per_token() == latent.bytes_per_token()
    assert made.notes[-1] == "group 'latent' has no heads to divide: each of the 8 tp ranks keeps all of it"


def test_convolutions_replicate_the_groups_that_do_not_divide() -> None:
    bamba = {**CONFIG, "model_type": "bamba", "attn_layer_indices": [9], "mamba_n_heads": 128, "mamba_d_head": 64}
    spec = from_config({**bamba, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4})
    made = make_plan(spec, "1GiB", parallel=Parallel(tp=8))
    assert made.state_bytes() == 9 * (3 * (8192 // 8 + 2 * 128) * 2 + 16 * 64 * 128 * 4)


# ---- context parallelism


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_blocks_that_ranks_divide_take_a_share_of_each_rank(cp: int) -> None:
    made = make_plan(LLAMA, "1GiB", parallel=Parallel(cp=cp))
    assert made.bytes_per_token() == Fraction(40960, cp)
    assert made.group("full").num_blocks_held(16 * 100) == -(-100 // cp)


def test_latents_are_divided_and_index_keys_replicated() -> None:
    config = {**CONFIG, "model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    made = make_plan(from_config({**config, "index_head_dim": 128}), "1GiB", parallel=Parallel(cp=4))
    assert {group.tag: group.context_shards for group in made.groups} == {"latent": 4, "indexer": 1}
    assert made.bytes_per_token() == 10 * (Fraction(576 * 2, 4) + 128 * 2)


@given(strategies.models(reads=False), st.sampled_from((2, 3, 4)), st.integers(1, 300))
def test_the_fullest_rank_holds_at_least_its_share(spec: ModelSpec, cp: int, length: int) -> None:
    one = make_plan(spec, "64MiB", pools="independent")
    many = make_plan(spec, "64MiB", pools="independent", parallel=Parallel(cp=cp))
    for whole, part in zip(one.groups, many.groups, strict=True):
        alone, share = whole.num_blocks_held(length), part.num_blocks_held(length)
        assert part.context_shards == (cp if whole.cache.context_split else 1)
        assert -(-alone // part.context_shards) <= share <= alone
        if whole.cache.reach == Full():
            assert share == -(-alone // part.context_shards)


@pytest.mark.parametrize("reach", [Window(64), SinkWindow(4, 64)])
def test_windows_that_are_divided_keep_a_share_of_their_fixed_bytes(reach: Any) -> None:
    cache = LayerCache("window", reach, (Role("key", (64,), DType.BFLOAT16),), context_split=True)
    spec = ModelSpec("mine", (Layer((cache,)),))
    made = make_plan(spec, "1MB", parallel=Parallel(cp=4))
    assert made.window_bytes() == spec.window_bytes() / 4


# ---- pipeline parallelism


HYBRID = ModelSpec(
    "hybrid",
    (
        *[Layer((LayerCache("state", State(), (Role("ssm_state", (100,), DType.FLOAT32),)),))] * 5,
        *[Layer((LayerCache("full", Full(), (Role("key", (64,), DType.BFLOAT16),)),))] * 3,
    ),
)


@given(st.integers(1, 40), st.integers(1, 40))
def test_stages_cut_the_layers_evenly_and_leave_none_out(num_layers: int, pp: int) -> None:
    if pp > num_layers:
        with pytest.raises(PlanError, match=f"pp={pp} stages for {num_layers} layers"):
            Parallel(pp=pp).stage(num_layers)
        return
    stages = [Parallel(pp=pp, pp_rank=rank).stage(num_layers) for rank in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_the_stages_of_a_model_add_up_to_the_whole(pp: int) -> None:
    stages = [make_plan(HYBRID, "1MB", parallel=Parallel(pp=pp, pp_rank=rank)) for rank in range(pp)]
    assert sum(stage.bytes_per_token() for stage in stages) == HYBRID.bytes_per_token()
    assert sum(stage.state_bytes() for stage in stages) == HYBRID.state_bytes()
    for tag, (_, layers) in HYBRID.groups().items():
        assert [layer for stage in stages for layer in stage.group(tag).layers] == list(layers)
    assert {tuple(group.tag for group in stage.groups) for stage in stages} <= {("state", "full"), ("full", "state")}


def test_a_group_of_another_stage_is_an_empty_placeholder() -> None:
    made = make_plan(HYBRID, "1MB", parallel=Parallel(pp=2, pp_rank=0))
    assert made.group("full").layers == ()
    assert (made.num_pages("full"), made.stride_bytes("full"), made.padding_bytes("full")) == (0, 0, 0)
    assert [pool.tags for pool in made.pools] == [("state",)]
    assert made.sequences(100) == made.num_pages("state")
    assert type(made).from_dict(made.to_dict()) == made


def test_layers_keep_their_numbers_in_a_stage() -> None:
    made = make_plan(HYBRID, "1MB", parallel=Parallel(pp=2, pp_rank=1))
    assert sorted({view.layer for view in made.views()}) == [4, 5, 6, 7]


def test_a_stage_that_keeps_nothing_has_an_empty_plan() -> None:
    spec = ModelSpec("mlp", (Layer(), *HYBRID.layers[5:]))
    made = make_plan(spec, "1MB", parallel=Parallel(pp=4, pp_rank=0))
    assert made.pools == ()
    assert made.num_bytes == 0
    assert made.views() == ()
    assert made.sequences(1000) > 10**9
    assert type(made).from_dict(made.to_dict()) == made


def test_a_reader_and_what_it_reads_must_share_a_stage() -> None:
    full = HYBRID.layers[5]
    spec = ModelSpec("reads", (full, full, full, Layer(reads=(Read(1, "full"),))))
    with pytest.raises(PlanError, match=r"stage 1 of 2 holds layers 2 to 3, but layer 3 reads .* layer 1.*choose pp"):
        make_plan(spec, "1MB", parallel=Parallel(pp=2, pp_rank=1))
    assert make_plan(spec, "1MB", parallel=Parallel(pp=1)).reads == ((3, Read(1, "full")),)


# ---- ranks


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tp": 0}, ("tp must be at least 1", "0")),
        ({"cp": -2}, ("cp must be at least 1", "-2")),
        ({"tp": 4, "tp_rank": 4}, ("tp_rank 4", "0 to 3")),
        ({"pp_rank": -1}, ("pp_rank -1", "0 to 0")),
    ],
)
def test_a_rank_that_cannot_be_is_named(degrees: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as error:
        Parallel(**degrees)
    for word in words:
        assert word in str(error.value)
