"""Simulations: cells, tiers, advice, policies from files."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.errors import BadOption, ConfigError, UnknownName
from kvweave.policy import EvictionCandidate
from kvweave.sim import Options, OracleHits, SimulatedTier, TokenSplit, Trace, load_policy, simulate
from kvweave.sim.advice import advice as advice_of
from kvweave.sim.geometry import Geometry
from kvweave.sim.replay import Replay, replay
from kvweave.sim.tiers import tier_uses
from tests.sim.plans import FULL, STATES, plan_of, trace_of

KIB = 1024


def turns(sessions: int = 6, rounds: int = 4) -> Trace:
    """Conversations in turn: each asks again with 40 more tokens."""
    words = [
        [session] * (40 * (turn + 1)) + [100 + turn] for turn in range(rounds) for session in range(1, sessions + 1)
    ]
    return trace_of(words)


def test_every_policy_and_memory_has_a_cell_and_oracles_are_shared() -> None:
    done = simulate(turns(), partial(plan_of, STATES), Options([16 * KIB, 8 * KIB], {"lru": "lru", "lfu": "lfu"}))
    assert [(cell.memory, cell.policy) for cell in done.cells] == [
        (8 * KIB, "lru"),
        (8 * KIB, "lfu"),
        (16 * KIB, "lru"),
        (16 * KIB, "lfu"),
    ]
    for cell in done.cells:
        assert cell.oracles is not None
        assert cell.split.hit <= cell.oracles.bound <= cell.split.overlap
        assert max(cell.oracles.placement, cell.oracles.belady, cell.oracles.both) <= cell.oracles.bound
        assert cell.saved_seconds == pytest.approx(cell.split.hit / 10_000)
        assert cell.to_dict()["hit_rate"] == cell.split.hit_rate


def test_oracles_and_the_bound_refuse_what_never_fits() -> None:
    """The second prompt asked again would be most of what can be hit, and cannot run."""
    trace = trace_of([[1] * 21, [2] * 4000, [1] * 21, [2] * 4000])
    cell = simulate(trace, partial(plan_of, FULL), Options([4 * KIB])).cells[0]
    assert (cell.refused, cell.split.hit) == (2, 20)
    assert cell.oracles == OracleHits(placement=20, belady=20, both=20, bound=20, cache_with_placement=20)


def test_the_cache_with_perfect_places_evicts_by_lru_whatever_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[object] = []

    def noted(*trace_and_plan: Any, **options: Any) -> Replay:
        if options.get("placement"):
            policies.append(options.get("policy"))
        return replay(*trace_and_plan, **options)

    monkeypatch.setattr(sys.modules["kvweave.sim.simulate"], "replay", noted)
    simulate(turns(), partial(plan_of, STATES), Options([8 * KIB], {"lfu": "lfu"}))
    assert policies == ["lru"]


def test_requests_of_every_replay_are_told() -> None:
    told: list[int] = []
    options = Options([8 * KIB], tiers=[SimulatedTier("host", 64 * KIB, 1e9, 0.0)])
    trace = turns()
    simulate(trace, partial(plan_of, STATES), options, on_request=lambda: told.append(1))
    assert len(told) == options.num_replays * len(trace.requests) == 3 * len(trace.requests)


def test_a_larger_tier_gives_what_the_device_lost() -> None:
    trace, plan = turns(), partial(plan_of, FULL)
    host = SimulatedTier("host", 64 * KIB, 1e9, 0.0)
    cell = simulate(trace, plan, Options([4 * KIB], tiers=[host])).cells[0]
    large = simulate(trace, plan, Options([64 * KIB])).cells[0]
    assert cell.tiers[0].loaded_tokens == large.split.hit - cell.split.hit > 0
    assert cell.hit_with_tiers == large.split.hit
    assert cell.saved_seconds_with_tiers == pytest.approx(large.saved_seconds, rel=0.01)


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    geometry = Geometry.of(plan_of(STATES))
    device, host = np.array([0, 8, 0]), np.array([40, 8, 4])
    quick = tier_uses(device, [(SimulatedTier("host", 1, 1e9, 0.0), host)], geometry, 1000.0)[0]
    assert (quick.found_tokens, quick.loaded_tokens) == (44, 44)
    assert quick.loaded_bytes == 11 * geometry.row_bytes + 2 * geometry.state_bytes
    slow = tier_uses(device, [(SimulatedTier("host", 1, 1e9, 0.01), host)], geometry, 1000.0)[0]
    assert (slow.found_tokens, slow.loaded_tokens) == (44, 40)
    assert slow.saved_seconds == pytest.approx(0.03, rel=0.01)
    never = tier_uses(device, [(SimulatedTier("host", 1, 1.0, 0.0), host)], geometry, 1000.0)[0]
    assert (never.loaded_tokens, never.loaded_bytes, never.saved_seconds) == (0, 0, 0)


def test_what_the_device_refuses_is_not_loaded_from_a_tier_in_which_it_would_fit() -> None:
    trace = trace_of([[1] * 21, [2] * 4000, [1] * 21, [2] * 4000, [2] * 101])
    host = SimulatedTier("host", 1024 * KIB, 1e9, 0.0)
    cell = simulate(trace, partial(plan_of, FULL), Options([4 * KIB], tiers=[host])).cells[0]
    assert (cell.refused, cell.split.hit) == (2, 20)
    assert cell.tiers[0].found_tokens == 0
    assert cell.computed_bytes == (21 + 1 + 101) // 4 * 64


def test_a_lower_tier_gives_only_what_those_above_it_lack() -> None:
    geometry = Geometry.of(plan_of(FULL))
    tiers = [(SimulatedTier("host", 1, 1e9, 0.0), np.array([8])), (SimulatedTier("disk", 2, 1e9, 0.0), np.array([20]))]
    host, disk = tier_uses(np.array([4]), tiers, geometry, 1000.0)
    assert (host.loaded_tokens, disk.loaded_tokens) == (4, 12)
    assert disk.loaded_bytes == 3 * geometry.row_bytes


def test_tiers_are_written_as_people_do() -> None:
    assert SimulatedTier.parse("host=256GB") == SimulatedTier("host", 256 * 10**9, 20e9, 50e-6)
    assert SimulatedTier.parse("disk=2TB@5GB/s") == SimulatedTier("disk", 2 * 10**12, 5e9, 200e-6)
    assert SimulatedTier.parse("tape=1TB@100MB/s") == SimulatedTier("tape", 10**12, 1e8, 0.0)
    for wrong in ("host", "tape=1TB", "=3GB", "host=256GB@"):
        with pytest.raises(BadOption, match="--tier: expected NAME=SIZE"):
            SimulatedTier.parse(wrong)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memories": []}, "at least one memory"),
        ({"memories": [1], "policies": {}}, "one policy"),
        ({"memories": [1], "prefill_speed": 0.0}, "above 0"),
        ({"memories": [1], "step_tokens": 0}, "above 0"),
        ({"memories": [9], "tiers": [SimulatedTier("host", 9, 1.0, 0.0)]}, "must be larger"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(BadOption, match=says):
        Options(**options)  # type: ignore[arg-type]


# ---- advice


def advice(trace: Trace, *memories: int, tiers: tuple[SimulatedTier, ...] = ()) -> str:
    return simulate(trace, partial(plan_of, FULL), Options(memories, tiers=tiers, with_oracles=False)).advice


def test_advice_names_the_memory_from_which_on_more_is_of_no_use() -> None:
    said = advice(turns(), 10 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)
    assert said.startswith("16 KiB would save ")
    assert "; more than that nothing (an infinite cache nothing more still)." in said


def test_advice_names_the_tier() -> None:
    assert advice(turns(), 10 * KIB, tiers=(SimulatedTier("host", 64 * KIB, 1e9, 0.0),)).startswith(
        "64 KiB of host memory would"
    )


def test_advice_says_when_memory_suffices_and_when_not() -> None:
    assert advice(turns(), 64 * KIB).endswith("an infinite cache nothing more; more memory saves nothing.")
    assert advice(turns(), 4 * KIB).endswith("try more memory (--memory, --tier).")
    assert "no cache would save anything" in advice(trace_of([[1] * 9, [2] * 9]), 4 * KIB)


@pytest.mark.parametrize(
    ("hits", "says"),
    [
        ((9890, 9905, 10_000), "3 GiB would save 1% more than 1 GiB (an infinite cache 2.0 times as much still)."),
        ((100, 5000, 5001), "2 GiB would save 50.0 times as much as 1 GiB; more than that nothing (an infinite"),
        ((0, 5), "2 GiB would save 5 tokens more than 1 GiB (an infinite cache 4000.2 times as much still)."),
        (
            (0, 0),
            "1 GiB saves 0% of all prompt tokens, an infinite cache 20,001 tokens more; 2 GiB saves nothing more, try",
        ),
        ((19_900, 19_950), "an infinite cache nothing more; more memory saves nothing."),
    ],
)
def test_advice_names_a_gain_and_what_was_tried(hits: tuple[int, ...], says: str) -> None:
    made = simulate(turns(), partial(plan_of, FULL), Options([8 * KIB], with_oracles=False)).cells[0]
    cells = [
        replace(made, memory=number * 2**30, split=TokenSplit(30_000, hit, max(0, 15_000 - hit), 0, 9999))
        for number, hit in enumerate(hits, 1)
    ]
    assert says in advice_of(cells)


# ---- policies


def test_a_policy_is_a_name_a_function_or_a_class_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def oldest(candidate):\n    return candidate.last_used\n\n"
        "class Mine:\n    def __call__(self, candidate):\n        return candidate.hits\n\nNUMBER = 3\n"
    )
    assert load_policy("lfu") == "lfu"
    options = Options([8 * KIB], {name: load_policy(name) for name in (f"{path}:oldest", f"{path}:Mine")})
    assert len(simulate(turns(), partial(plan_of, STATES), options).cells) == 2
    for wrong, says in (("Nobody", "has no attribute"), ("NUMBER", "cannot be called")):
        with pytest.raises(ConfigError, match=says):
            load_policy(f"{path}:{wrong}")
    with pytest.raises(ConfigError, match="no file is at"):
        load_policy("nowhere.py:Mine")
    with pytest.raises(UnknownName, match="did you mean 'lru'"):
        load_policy("lr")


def test_what_a_policy_has_learned_in_one_replay_is_unknown_to_the_next() -> None:
    class Tired:
        """Keeps the least recently used after 20 answers."""

        asked = 0

        def value(self, point: EvictionCandidate) -> float:
            self.asked += 1
            return point.age if self.asked > 20 else -point.age

    def hits(*memories: int) -> list[int]:
        options = Options(memories, {"tired": Tired}, with_oracles=False)
        return [cell.split.hit for cell in simulate(turns(), partial(plan_of, FULL), options).cells]

    assert hits(8 * KIB, 12 * KIB) == hits(8 * KIB) + hits(12 * KIB)


def test_a_policy_that_ends_the_process_as_it_is_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import sys\nclass Early:\n def __init__(self): sys.exit(3)\n")
    with pytest.raises(ConfigError, match="mine.py:Early' cannot be loaded: SystemExit: 3"):
        load_policy(f"{path}:Early")


def test_a_timeline_begins_with_the_first_request_that_is_replayed() -> None:
    """A sample may begin long after its trace."""
    trace = turns()
    late = replace(trace, requests=tuple(replace(r, arrival=5000 + r.arrival) for r in trace.requests))
    at_once, later = (simulate(t, partial(plan_of, FULL), Options([64 * KIB])).cells[0].timeline for t in (trace, late))
    assert [bucket.start + 5000 for bucket in at_once] == pytest.approx([bucket.start for bucket in later])
    assert [bucket.split for bucket in at_once] == [bucket.split for bucket in later]
    assert len(later) == len(trace.requests)


def test_a_trace_of_one_moment_has_a_timeline() -> None:
    trace = turns()
    still = replace(trace, requests=tuple(replace(request, arrival=0.0) for request in trace.requests))
    done = simulate(still, partial(plan_of, FULL), Options([64 * KIB]))
    assert len(done.cells[0].timeline) == 1
