"""The budget is exact, to the byte and to the page, whatever the model and however its memory is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvweave import from_config, make_plan
from kvweave.errors import NeverFits, PlanError, UnknownName
from kvweave.plan import Place, Plan, PoolRequest
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Role, State, Window
from tests import strategies

LLAMA = from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "dtype": "bfloat16",
    }
)
PAGE = 4 * 2 * 2 * 128 * 2 * 16

FULL = LayerCache("full", Full(), (Role("key", (2, 64), DType.BFLOAT16),))
WINDOW = LayerCache("window", Window(128), (Role("key", (2, 32), DType.BFLOAT16),))
STATE = LayerCache("state", State(), (Role("ssm_state", (7, 1024), DType.FLOAT32),))
HYBRID = ModelSpec("hybrid", (*[Layer((STATE,))] * 3, Layer((FULL,)), Layer((WINDOW,))))


def elastic_units(made: Plan, own_pools: dict[str, PoolRequest] | None) -> list[int]:
    counted = {tag for tag, request in (own_pools or {}).items() if request.pages is not None}
    return [pool.unit_bytes for pool in made.pools if pool.name not in counted]


@given(st.data(), strategies.models(), st.integers(0, 2_000_000))
def test_a_plan_fills_its_memory_to_less_than_a_page(data: st.DataObject, spec: ModelSpec, extra: int) -> None:
    how = data.draw(strategies.wishes(spec))
    memory = strategies.smallest_memory(spec, **how) + extra
    made = make_plan(spec, memory, **how)
    assert made.num_bytes <= memory
    if units := elastic_units(made, how["own_pools"]):
        assert memory < made.num_bytes + min(units)
    assert made.num_bytes == how["reserve"] + sum(pool.num_bytes for pool in made.pools if pool.place is Place.DEVICE)


@given(st.data(), strategies.models(), st.one_of(st.none(), st.integers(1, 200)))
def test_the_smallest_memory_that_an_error_names_does_and_a_byte_less_does_not(
    data: st.DataObject, spec: ModelSpec, context: int | None
) -> None:
    how = data.draw(strategies.wishes(spec)) | {"context": context}
    how["own_pools"] = {
        tag: PoolRequest(pages=200, place=request.place) if request.pages else request
        for tag, request in how["own_pools"].items()
    }
    smallest = strategies.smallest_memory(spec, **how)
    assume(smallest > 1)
    made = make_plan(spec, smallest, **how)
    assert made.sequences(context or 1) >= 1
    with pytest.raises(NeverFits) as error:
        make_plan(spec, smallest - 1, **how)
    assert error.value.smallest_bytes == smallest
    assert error.value.available_bytes == smallest - 1
    for number in (smallest, smallest - 1, context or 1):
        assert str(number) in str(error.value)


@given(st.data(), strategies.models(), st.integers(1, 200), st.integers(0, 3_000_000))
def test_a_length_that_must_fit_fits(data: st.DataObject, spec: ModelSpec, context: int, extra: int) -> None:
    how = data.draw(strategies.wishes(spec, own_pools=False)) | {"context": context}
    how["own_pools"] = {tag: PoolRequest(weight=data.draw(st.floats(0.01, 100))) for tag in list(spec.groups())[:2]}
    made = make_plan(spec, strategies.smallest_memory(spec, **how) + extra, **how)
    assert made.sequences(context) >= 1


@pytest.mark.parametrize("spare", [0, 1, PAGE - 1, PAGE, 7 * PAGE + 5])
def test_whole_pages_and_no_more(spare: int) -> None:
    made = make_plan(LLAMA, 3 * PAGE + spare)
    assert made.num_pages("full") == 2 + spare // PAGE
    assert made.num_bytes == (1 + made.num_pages("full")) * PAGE, "the NULL page is memory too"


@pytest.mark.parametrize(("memory", "pages"), [("1MiB", 2**20 // PAGE), ("1MB", 10**6 // PAGE), (5 * PAGE, 5)])
def test_memory_may_be_said_in_words(memory: int | str, pages: int) -> None:
    assert make_plan(LLAMA, memory).pool("full").num_superpages == pages


@pytest.mark.parametrize("memory", [0, -1, "-1GiB", "lots", "", True, "0GiB"])
def test_memory_that_is_none_is_an_error(memory: Any) -> None:
    with pytest.raises(PlanError):
        make_plan(LLAMA, memory)


def test_a_reserve_is_left_alone() -> None:
    made = make_plan(LLAMA, 10 * PAGE, reserve=PAGE + 1)
    assert made.num_pages("full") == 7
    assert made.num_bytes == 9 * PAGE + 1
    with pytest.raises(NeverFits) as error:
        make_plan(LLAMA, 2 * PAGE + 5, reserve=PAGE)
    assert error.value.smallest_bytes == 3 * PAGE


@pytest.mark.parametrize("reserve", [0, "0", "0GiB"])
def test_no_reserve_may_be_said_in_words_too(reserve: int | str) -> None:
    assert make_plan(LLAMA, 10 * PAGE, reserve=reserve).reserve == 0


def test_a_negative_reserve_is_an_error() -> None:
    with pytest.raises(PlanError, match="reserve.*-5"):
        make_plan(LLAMA, 10 * PAGE, reserve=-5)


def test_a_context_that_never_fits_says_what_would() -> None:
    with pytest.raises(NeverFits) as error:
        make_plan(LLAMA, 10 * PAGE, context=1000)
    assert error.value.smallest_bytes == (63 + 1) * PAGE
    assert make_plan(LLAMA, 64 * PAGE, context=1000).sequences(1000) == 1
    with pytest.raises(PlanError, match="context must be 1 to 1,099,511,627,776 tokens, got 0"):
        make_plan(LLAMA, 10 * PAGE, context=0)


# ---- pools of their own


@pytest.mark.parametrize("pools", ["shared", "independent"])
def test_a_pool_has_the_pages_that_were_asked_for(pools: str) -> None:
    made = make_plan(HYBRID, "10MB", pools=pools, own_pools={"state": PoolRequest(pages=9)})
    assert made.num_pages("state") == 9
    assert made.pool("state").num_bytes == (1 + 9) * 3 * 7 * 1024 * 4
    assert 10**7 - made.num_bytes < min(pool.unit_bytes for pool in made.pools if pool.name != "state")


@pytest.mark.parametrize("place", [Place.HOST, Place.PINNED])
def test_host_bytes_are_never_charged_to_the_device(place: Place) -> None:
    without = ModelSpec("rest", (*[Layer()] * 3, *HYBRID.layers[3:]))
    made = make_plan(HYBRID, "1MB", own_pools={"state": PoolRequest(pages=500, place=place)})
    assert made.host_bytes == 501 * 3 * 7 * 1024 * 4 > 10**6
    assert made.num_bytes == make_plan(without, "1MB").num_bytes <= 10**6
    assert made.pool("state").place is place


def test_a_plan_whose_pools_are_all_on_the_host_takes_no_device_memory() -> None:
    own = {tag: PoolRequest(pages=50, place=Place.HOST) for tag in HYBRID.groups()}
    made = make_plan(HYBRID, 1, own_pools=own)
    assert made.num_bytes == 0
    assert made.sequences(100) > 0


def test_weights_divide_what_is_left() -> None:
    own = {"full": PoolRequest(weight=3), "window": PoolRequest(weight=1), "state": PoolRequest(pages=2)}
    made = make_plan(HYBRID, "10MB", own_pools=own)
    full, window = made.pool("full").num_bytes, made.pool("window").num_bytes
    assert abs(full - 3 * window) < 5 * max(made.pool("full").unit_bytes, made.pool("window").unit_bytes)


def test_pools_by_demand_run_full_together() -> None:
    made = make_plan(HYBRID, "40MB", pools="independent", context=4096)
    fits = {pool.name: pool.num_superpages / made.superpages_for(pool, 4096) for pool in made.pools}
    assert max(fits.values()) < 1.1 * min(fits.values())


@pytest.mark.parametrize("pages", [4, 5, 6, 7, 8, 9, 31])
def test_the_last_whole_page_goes_to_one_of_two_equal_pools(pages: int) -> None:
    spec = ModelSpec("twins", (Layer((FULL,)), Layer((replace(FULL, tag="twin"),))))
    page = 16 * 2 * 64 * 2
    made = make_plan(spec, pages * page, pools="independent")
    assert made.num_bytes == pages * page
    assert abs(made.num_pages("full") - made.num_pages("twin")) <= 1


def test_a_small_pool_keeps_what_one_sequence_needs() -> None:
    """The state's share by demand is less than one page here, and the others would leave it none."""
    made = make_plan(HYBRID, 300_000, pools="independent")
    assert made.num_pages("state") >= 1
    assert made.sequences(1) >= 1
    own = {"full": PoolRequest(weight=1000), "window": PoolRequest(weight=1), "state": PoolRequest(weight=1)}
    assert make_plan(HYBRID, 300_000, own_pools=own).sequences(1) >= 1


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"pages": 0}, ("at least 1 page", "0")),
        ({"pages": 3, "weight": 1.0}, ("pages=3", "weight=1.0")),
        ({"weight": 0.0}, ("more than 0", "0.0")),
        ({"weight": float("nan")}, ("more than 0", "nan")),
        ({"place": Place.HOST}, ("host pool", "number of pages")),
    ],
)
def test_a_request_that_contradicts_itself_is_named(request_: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as error:
        PoolRequest(**request_)
    for word in words:
        assert word in str(error.value)


def test_too_few_pages_for_one_sequence_are_an_error_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"pool 'full' has 3 pages, but one sequence of 100 tokens takes 7"):
        make_plan(HYBRID, "10MB", own_pools={"full": PoolRequest(pages=3)}, context=100)


def test_a_pool_for_a_tag_that_is_not_there_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"tag of a pool 'windw'; did you mean 'window'\?"):
        make_plan(HYBRID, "10MB", own_pools={"windw": PoolRequest()})


def test_a_group_may_be_called_shared() -> None:
    spec = HYBRID.retag({"state": "shared"})
    made = make_plan(spec, "10MB", own_pools={"shared": PoolRequest(pages=9)})
    assert made.num_pages("shared") == 9
    assert len({pool.name for pool in made.pools}) == len(made.pools) == 2
    assert made.pool(made.group("full").pool).tags == ("full", "window")
