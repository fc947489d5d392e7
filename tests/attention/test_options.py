"""A reach as three numbers says what the reach says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.attention.options import Band
from kvweave.errors import NoKernel
from kvweave.spec import Chunk, Full, Reach, SinkWindow, State, Window

sizes = st.integers(1, 5000)
reaches = st.one_of(
    st.just(Full()),
    sizes.map(Window),
    sizes.map(Chunk),
    st.tuples(sizes, sizes).map(lambda both: SinkWindow(*both)),
)


@given(reaches, st.integers(0, 200_000))
def test_a_band_has_the_head_and_the_tail_of_its_reach(reach: Reach, position: int) -> None:
    band = Band.of(reach)
    assert band.head == reach.head
    assert band.tail(np.array([position]))[0] == reach.tail(position)


@dataclass(frozen=True)
class Backwards:
    kind: ClassVar[str] = "backwards"
    per_token: ClassVar[bool] = True
    head: ClassVar[int] = 0
    span: ClassVar[int] = 64

    def tail(self, position: Any) -> Any:
        return position // 2


@pytest.mark.parametrize("reach", [State(), Backwards()], ids=["state", "backwards"])
def test_what_three_numbers_cannot_say_is_refused(reach: Reach) -> None:
    with pytest.raises(NoKernel, match=f"a reach of kind '{reach.kind}' cannot be attended to"):
        Band.of(reach)
