"""A plan as a record: JSON in and out, look-ups, capacity, and what it says of itself."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from fractions import Fraction
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import Cache, Parallel, explain, from_config, make_plan
from kvweave.errors import CoarseReuse, KVWeaveError, PlanError, UnknownName
from kvweave.plan import Layout, Plan, PoolRequest, one_page_size
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Role, State, Window
from tests import strategies

KEY = Role("key", (2, 64), DType.BFLOAT16)
FULL = LayerCache("full", Full(), (KEY,))
WINDOW = LayerCache("window", Window(100), (KEY,))
STATE = LayerCache("state", State(), (Role("ssm_state", (64, 100), DType.FLOAT32),))
HYBRID = ModelSpec("hybrid", (Layer((STATE,)), Layer((STATE,)), Layer((FULL,)), Layer((WINDOW,))))


def example(name: str, **how: Any) -> ModelSpec:
    return from_config(str(files("kvweave") / "examples" / f"{name}.json"), **how)


# ---- JSON


@given(strategies.plans())
def test_a_plan_goes_to_json_and_back(made: Plan) -> None:
    back = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert back == made
    assert back.notes == made.notes
    assert back.views() == made.views()


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "gemma-3n-e4b", "qwen3-next-80b", "llama-3.1-8b"])
def test_the_plan_of_a_real_model_goes_to_json_and_back(name: str) -> None:
    made = make_plan(example(name, dtype="fp8"), "80GiB")
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "page_mayor"}, ("plan.layout", "'page_mayor'", "did you mean 'page_major'?")),
        ({"reads": [[1]]}, ("plan.reads[0]", "2 entries", "1")),
        ({"reads": [[1, {"layer": 0, "tag": "full", "rolls": []}]]}, ("plan.reads[0][1]", "'rolls'", "'roles'")),
        ({"parallel": {"tp": 0}}, ("plan.parallel", "tp must be at least 1", "0")),
        ({"pool": []}, ("plan", "'pool'", "did you mean 'pools'?")),
        ({"memory": "80GiB"}, ("plan.memory", "expected int", "'80GiB'")),
        ({"groups": 3}, ("plan.groups", "expected a list")),
    ],
)
def test_what_is_wrong_in_a_plan_is_named_with_its_place(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(KVWeaveError) as error:
        Plan.from_dict({**make_plan(HYBRID, "10MB").to_dict(), **change})
    for word in words:
        assert word in str(error.value)


def test_a_plan_carries_the_digest_of_the_whole_model() -> None:
    assert make_plan(HYBRID, "10MB").digest == make_plan(HYBRID, "20MB").digest == HYBRID.digest()


# ---- kinds of pools and layouts


def test_one_group_is_uniform_and_layer_major_and_a_hybrid_shares_page_by_page() -> None:
    alone = make_plan(ModelSpec("one", (Layer((FULL,)),) * 3), "10MB")
    assert [(pool.name, pool.lanes) for pool in alone.pools] == [("full", 3)]
    assert alone.layout is Layout.LAYER_MAJOR
    hybrid = make_plan(HYBRID, "10MB")
    assert [(pool.name, pool.tags, pool.lanes) for pool in hybrid.pools] == [("shared", ("state", "full", "window"), 1)]
    assert hybrid.layout is Layout.PAGE_MAJOR


def test_independent_pools_are_one_a_group() -> None:
    made = make_plan(HYBRID, "10MB", pools="independent")
    assert [pool.tags for pool in made.pools] == [("state",), ("full",), ("window",)]


def test_a_group_with_its_own_pool_leaves_the_others_together() -> None:
    made = make_plan(HYBRID, "10MB", own_pools={"state": PoolRequest(pages=4)})
    assert [pool.tags for pool in made.pools] == [("full", "window"), ("state",)]
    made = make_plan(HYBRID, "10MB", own_pools={"state": PoolRequest(pages=4), "full": PoolRequest()})
    assert sorted(pool.tags for pool in made.pools) == [("full",), ("state",), ("window",)]


def test_a_uniform_pool_of_several_groups_is_an_error_that_names_them() -> None:
    with pytest.raises(PlanError, match=r"one group, this model has 3 \(state, full, window\)"):
        make_plan(HYBRID, "10MB", pools="uniform")
    make_plan(ModelSpec("one", (Layer((FULL,)),)), "10MB", pools="uniform")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"pools": "shard"}, r"kind of pools 'shard'; did you mean 'shared'\?"),
        ({"layout": "page"}, r"layout 'page'; did you mean 'page_major'\?"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        make_plan(HYBRID, "10MB", **how)


def test_a_model_that_keeps_nothing_is_an_error() -> None:
    with pytest.raises(PlanError, match="'mlp' keeps no cache in any layer"):
        make_plan(ModelSpec("mlp", (Layer(),)), "10MB")


def test_looking_up_what_is_not_there_suggests_the_nearest() -> None:
    made = make_plan(HYBRID, "10MB")
    with pytest.raises(UnknownName, match=r"tag 'windw'; did you mean 'window'\?"):
        made.group("windw")
    with pytest.raises(UnknownName, match=r"pool 'shard'; did you mean 'shared'\?"):
        made.pool("shard")


# ---- capacity


@given(strategies.plans(most_bytes=400_000), st.integers(1, 300))
def test_sequences_are_as_many_as_fit_and_one_more_does_not(made: Plan, length: int) -> None:
    def fits(sequences: int) -> bool:
        """Every group's pages, in whole super-pages, beside the NULL one."""
        for pool in made.pools:
            groups = [group for group in made.groups if group.pool == pool.name]
            pages = [(group.num_blocks_held(length) * sequences, group.pages_per_superpage) for group in groups]
            if sum(-(-count // per_super) for count, per_super in pages) > pool.num_superpages - 1:
                return False
        return True

    most = made.sequences(length)
    assert fits(most)
    assert not fits(most + 1)
    if most < 50:
        assert [fits(count) for count in range(most + 2)] == [True] * (most + 1) + [False]


def test_capacity_is_two_numbers() -> None:
    made = make_plan(HYBRID, "100MB")
    assert made.bytes_per_token() == 256
    assert made.window_bytes() == 100 * 256
    assert made.state_bytes() == 2 * 64 * 100 * 4


@pytest.mark.parametrize("length", [4096, 32768, 131072])
def test_the_sequences_that_fit_are_near_what_the_two_numbers_say(length: int) -> None:
    """Qwen3-Next on 80 GiB: block rounding and padding cost little."""
    spec = example("qwen3-next-80b")
    made = make_plan(spec, "80GiB")
    ideal = 80 * 2**30 / (spec.state_bytes() + length * spec.bytes_per_token())
    assert 0.93 * ideal - 2 < made.sequences(length) <= ideal


def test_bytes_of_pages_a_sequence_holds_are_within_a_block_of_its_rows() -> None:
    made = make_plan(HYBRID, "100MB")
    held = sum(made.group(tag).num_blocks_held(1000) * made.group(tag).payload_bytes for tag in HYBRID.groups())
    rows = made.state_bytes() + made.window_bytes() + 1000 * made.bytes_per_token()
    assert rows <= held <= rows + 3 * 16 * 256


def test_compressed_rows_cost_a_fraction_a_token() -> None:
    made = make_plan(example("deepseek-v4-flash", dtype="fp8"), "80GiB")
    assert made.bytes_per_token() == Fraction(385025, 100)


# ---- prefix reuse


def blocks(full: int, other: int) -> Plan:
    spec = ModelSpec("two", (Layer((FULL,)), Layer((replace(FULL, tag="other"),))))
    return make_plan(spec, "10MB", block_tokens={"full": full, "other": other})


@pytest.mark.parametrize(("full", "other", "tokens"), [(16, 16, 16), (16, 64, 64), (12, 8, 24)])
def test_prefixes_are_reused_where_blocks_of_all_groups_end_together(full: int, other: int, tokens: int) -> None:
    made = blocks(full, other)
    assert made.reuse_tokens == tokens
    cache = Cache(made)
    with cache.open(range(5 * tokens)) as first:
        cache.extend(first, 5 * tokens)
        cache.commit(first, 5 * tokens)
    assert cache.open([*range(2 * tokens), *[7] * tokens]).num_cached == 2 * tokens
    assert cache.open([*range(2 * tokens - 1), *[7] * tokens]).num_cached == tokens


def test_blocks_of_context_parallel_ranks_end_together_once_each_has_one() -> None:
    split = replace(FULL, context_split=True)
    assert make_plan(ModelSpec("one", (Layer((split,)),)), "10MB", parallel=Parallel(cp=3)).reuse_tokens == 48


def test_a_plan_warns_of_blocks_that_seldom_end_together_and_names_the_cure() -> None:
    with pytest.warns(CoarseReuse, match="divide one another"):
        made = blocks(1024, 1023)
    assert made.reuse_tokens == 1_047_552
    assert "steps of 1,047,552 tokens, where blocks of full 1,024, other 1,023 tokens end together" in made.notes[-1]
    assert made.notes[-1] in explain(made)


def test_a_plan_does_not_warn_of_a_step_of_four_blocks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert blocks(5, 4).reuse_tokens == 20
    with pytest.warns(CoarseReuse):
        blocks(6, 5)


def test_a_window_beyond_the_context_is_said_to_be_full_attention() -> None:
    spec = ModelSpec("mine", (Layer((WINDOW,)),), max_tokens=100)
    assert "reaches 100 tokens back, and the model's context ends at 100" in make_plan(spec, "10MB").notes[-1]
    assert make_plan(replace(spec, max_tokens=101), "10MB").notes == ()
    assert make_plan(replace(spec, max_tokens=None), "10MB").notes == ()


# ---- what it says of itself


def test_a_plan_explains_its_groups_its_padding_and_the_usual_scheme() -> None:
    made = make_plan(example("qwen3-next-80b"), "80GiB")
    text = explain(made)
    for group in made.groups:
        assert f"group {group.tag}" in text
    usual = one_page_size(made)
    for word in ("padding", "super-page", "one padded page size", f"{usual.block_tokens['full']:,}", "left over"):
        assert word in text


def test_an_explanation_gives_reasons() -> None:
    text = explain(make_plan(example("qwen3-next-80b"), "80GiB"))
    for why in (
        "a state has no tokens to cut by, so a page is one snapshot",
        "pages differ in size, so groups take super-pages of 73.88 MiB",
        "the smallest size found below 1%",
        "prefixes are shared in steps of 16 tokens, where blocks of all groups end (full 16)",
        "of which full 91%, state 9%",
        "a state cannot be cut, so blocks grow (full from 16 to 1,056 tokens)",
    ):
        assert why in text
    alone = explain(make_plan(example("llama-3.1-8b"), "80GiB"))
    assert "one group has it, so a super-page is one of its pages" in alone
    assert "as most kernels expect" in alone


def test_notes_of_the_reader_and_of_the_planner_are_told() -> None:
    spec = from_config({"model_type": "llama9", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64})
    text = explain(make_plan(spec, "10MB"))
    assert "model_type 'llama9' is not known here" in text
    assert "has blocks of 64 tokens, not 16" in explain(make_plan(example("deepseek-v3.2", dtype="fp8"), "10GiB"))


@given(strategies.plans())
def test_any_plan_can_explain_itself(made: Plan) -> None:
    text = explain(made)
    assert len(text.splitlines()) >= len(made.groups) + len(made.pools)


def test_a_placeholder_is_called_one() -> None:
    spec = ModelSpec("mine", (Layer((FULL,)),), placeholders=(STATE,))
    made = make_plan(spec, "1MB")
    assert "group state: a placeholder" in explain(made)
    assert made.num_pages("state") == 0


# ---- the scheme most engines use


def test_one_page_size_makes_blocks_of_hundreds_of_tokens_beside_a_state() -> None:
    """Qwen3-Next: a state of 2,146,304 B a layer, 2,048 B a token: no block below 1,048 tokens is as large."""
    made = make_plan(example("qwen3-next-80b"), "80GiB")
    usual = one_page_size(made)
    state = (3 * (2 * 16 * 128 + 32 * 128) * 2) + 32 * 128 * 128 * 4
    assert usual.block_tokens["full"] == -(-state // (16 * 2048)) * 16 == 1056
    assert usual.page_bytes == 1056 * 2048
    assert usual.page_bytes >= state
    assert usual.bytes_per_sequence > 0
    assert 0 < usual.padding_share < 1


def test_one_page_size_pads_little_where_kinds_have_equal_rows_and_counts() -> None:
    """gpt-oss: 18 windows and 18 full layers with equal rows: one page fits both."""
    made = make_plan(example("gpt-oss-120b"), "80GiB")
    usual = one_page_size(made)
    assert usual.padding_share == 0
    assert usual.page_bytes == 16 * 2 * 8 * 64 * 2


def test_one_page_size_fills_up_groups_with_layers_that_hold_nothing() -> None:
    """Gemma 3 27B: 52 windows and 10 full layers in groups of 10: two slots of the sixth group are empty."""
    made = make_plan(example("gemma-3-27b"), "80GiB")
    usual = one_page_size(made)
    assert usual.layers_per_group == 10
    held = usual.bytes_per_sequence / usual.page_bytes / 10
    full, window = made.group("full").num_blocks_held(32768), made.group("window").num_blocks_held(32768)
    assert held == full + 6 * window
    assert usual.padding_share == pytest.approx(1 - (10 * full + 52 * window) / (10 * held))


@pytest.mark.parametrize("wrong", [1.5, float("nan"), "16", [], ..., True, 0, -16, 2**70], ids=repr)
def test_blocks_that_are_no_whole_number_of_tokens_are_refused(wrong: Any) -> None:
    for wish in (wrong, {"full": wrong}):
        for name in ("block_tokens", "kernel_tokens"):
            options: dict[str, Any] = {name: wish}
            with pytest.raises(PlanError, match=name):
                make_plan(HYBRID, "10MB", **options)


def test_blocks_may_be_whole_numbers_of_numpy() -> None:
    made = make_plan(HYBRID, "10MB", block_tokens=np.int64(32), kernel_tokens={"full": np.uint8(8)})  # type: ignore[arg-type, dict-item]
    assert made == make_plan(HYBRID, "10MB", block_tokens=32, kernel_tokens={"full": 8})
    assert made.group("full").block_tokens == 32
    assert json.dumps(made.to_dict())


@pytest.mark.parametrize("wrong", [None, 1.5, "2"])
def test_arguments_of_a_plan_of_the_wrong_type_are_named(wrong: Any) -> None:
    calls = (
        lambda: Parallel(tp=wrong),
        lambda: Parallel(cp=2, cp_rank=wrong),
        lambda: make_plan(HYBRID, "10MB", own_pools={"full": wrong}),
        lambda: Role("key", (8,), DType.FLOAT16, tokens_per_row=wrong),
        lambda: Role("key", (8,), DType.FLOAT16, token_axis=wrong),
        lambda: LayerCache("full", Full(), (Role("key", (8,), DType.FLOAT16),), kernel_tokens=wrong),
    )
    for call in calls:
        with pytest.raises(KVWeaveError):
            call()


def test_a_length_of_nothing_is_not_explained() -> None:
    with pytest.raises(PlanError, match="no sequence has 0 tokens"):
        explain(make_plan(HYBRID, "10MB"), 0)


IMPOSSIBLE: dict[str, Any] = {
    "num_layers": (0, -1),
    "memory": (0, -1, 1000),
    "reserve": (-1, 10**15),
    "draft_layers": ([7], [-1]),
    "groups": ([],),
    "pools": ([],),
    "groups.0.tag": ("window",),
    "groups.0.layers": ([0, 0], [-1], [10**15], [0, 1, 2]),
    "groups.0.block_tokens": (0, -16, 8, 24, 10**15),
    "groups.0.kernel_tokens": (0, -16, 3, 8),
    "groups.0.context_shards": (0, 2),
    "groups.0.pool": ("", "other"),
    "groups.0.lane_layers": (0, 2, -1),
    "groups.0.pages_per_superpage": (0, -1, 10**15),
    "groups.0.kernel_stride": (0, -16, 8, 10**15),
    "groups.0.cache.roles.0.shape": ([10**9],),
    "pools.0.name": ("other",),
    "pools.0.tags": (["full"], [], ["full", "window", "more"]),
    "pools.0.lanes": (0, -1, 3),
    "pools.0.superpage_bytes": (0, -1, 10**15),
    "pools.0.num_superpages": (0, -1, 10**15),
    "parallel.cp": (2,),
}


@pytest.mark.parametrize(("path", "wrong"), [(path, wrong) for path, all_ in IMPOSSIBLE.items() for wrong in all_])
def test_a_plan_with_impossible_numbers_is_not_read(path: str, wrong: Any) -> None:
    caches = [
        LayerCache(tag, reach, (Role("key", (8,), DType.FLOAT16),), context_split=tag == "full")
        for tag, reach in (("full", Full()), ("window", Window(9)))
    ]
    data = make_plan(ModelSpec("two", tuple(Layer((cache,)) for cache in caches)), "1MB").to_dict()
    assert Plan.from_dict(json.loads(json.dumps(data))).to_dict() == data
    *parents, name = path.split(".")
    part: Any = data
    for key in parents:
        part = part.setdefault(key, {}) if isinstance(part, dict) else part[int(key)]
    part[name] = wrong
    with pytest.raises(PlanError):
        Plan.from_dict(data)
