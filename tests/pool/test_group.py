"""What a group of layers is for the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import kvweave as kw
from kvweave.errors import SpecError
from kvweave.spec import DType


@dataclass(frozen=True, slots=True)
class Swaying:
    """Sees 16 tokens back, but 64 from positions that are multiples of 48."""

    kind: ClassVar[str] = "swaying"
    per_token: ClassVar[bool] = True
    head: int = 0
    span: int = 64

    def tail(self, position: Any) -> Any:
        seen = np.where(np.asarray(position) % 48 == 0, 64, 16)
        return np.maximum(0, position - seen)


def test_a_reach_that_needs_again_what_it_had_left_behind_is_refused_by_name() -> None:
    rows = (kw.Role("key", (2, 64), DType.BFLOAT16),)
    layer = kw.Layer((kw.LayerCache("sway", Swaying(), rows),))
    plan = kw.make_plan(kw.ModelSpec("mine", (layer,)), "1MiB", block_tokens=16)
    with pytest.raises(SpecError, match=r"'sway': to go on from 48 it needs tokens from 0 on.*from 32 on.*Swaying"):
        kw.Cache(plan)
