"""States are read and written by slot."""

from __future__ import annotations

import pytest
import torch

from kvweave import make_plan
from kvweave.attention import read_states, write_states
from kvweave.errors import BadRows
from kvweave.plan import Layout
from kvweave.spec import Segment
from kvweave.tensor import GQA, Arena, LayerRequest, LayerView, Recurrent, assemble


def layer(arena_of: list[Arena], state: tuple[int, ...], layout: Layout) -> LayerView:
    recurrent = Recurrent(state, (Segment(8, 3),))
    spec = assemble("states", [(recurrent, LayerRequest(0)), (recurrent, LayerRequest(1)), (GQA(), LayerRequest(2))])
    arena_of.append(Arena(make_plan(spec, "24MB", layout=layout)))
    return arena_of[-1].layer(1)


@pytest.mark.parametrize("state", [(4, 8, 8), (16, 64, 16)], ids=["small", "large"])
@pytest.mark.parametrize("layout", Layout)
def test_what_is_written_at_a_slot_is_read_there(state: tuple[int, ...], layout: Layout) -> None:
    view = layer([], state, layout)
    slots = torch.tensor([5, 3, 8])
    rows = {name: torch.randn(3, *role.role.shape).to(role.tensor.dtype) for name, role in view.roles.items()}
    write_states(view, rows, slots)
    back = read_states(view, torch.tensor([8, 5, 3, 4]))
    for name, written in rows.items():
        assert torch.equal(back[name][:3], written[[2, 0, 1]])
        assert not back[name][3].any(), "others are left alone"


def test_states_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    view = layer([], (4, 8, 8), Layout.PAGE_MAJOR)
    good = torch.ones(1, 4, 8, 8)
    with pytest.raises(BadRows, match=r"conv_state.* takes states \[1, 24, 3\]"):
        write_states(view, {"ssm_state": good, "conv_state": good}, torch.tensor([5]))
    with pytest.raises(BadRows, match="not all among"):
        write_states(view, {"ssm_state": good}, torch.tensor([100_000]))
    assert not read_states(view, torch.tensor([5]))["ssm_state"].any()


def test_tokens_are_no_states() -> None:
    arenas: list[Arena] = []
    layer(arenas, (4, 8, 8), Layout.PAGE_MAJOR)
    with pytest.raises(BadRows, match="keeps tokens"):
        read_states(arenas[0].layer(2), torch.tensor([5]))
