"""Runs the command line within the test's own process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """How a command ended, and what it wrote."""

    code: int | str | None
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        data: dict[str, Any] = json.loads(self.out)
        return data


Kvweave = Callable[..., Run]
"""`kvweave("plan", "gemma-3-27b")`."""
