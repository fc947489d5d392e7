"""An attention kind of your own: blocks of tokens that see themselves and the block before, as some encoders have.

A kind says how far back it must see to go on from a position: `head` and `tail`. Memory, block tables, prefix hits and
eviction follow. Nothing else in kvweave is told about it.

Run: python examples/own_attention_kind.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import kvweave as kw
from kvweave.spec import DType, register_reach


@register_reach
@dataclass(frozen=True, slots=True)
class TwoChunks:
    """Attends to the tokens of its own chunk and of the one before."""

    tokens: int
    kind: ClassVar[str] = "two_chunks"
    per_token: ClassVar[bool] = True
    head: ClassVar[int] = 0

    @property
    def span(self) -> int:
        return 2 * self.tokens

    def tail(self, position: Any) -> Any:
        """The start of the chunk before that of token `position`; `position` may be an array."""
        start = (position // self.tokens - 1) * self.tokens
        return start * (start > 0)


def model(chunk: int) -> kw.ModelSpec:
    """Three layers of the new kind to one that sees everything."""
    rows = (kw.Role("key", (4, 64), DType.BFLOAT16), kw.Role("value", (4, 64), DType.BFLOAT16))
    local = kw.Layer((kw.LayerCache("two_chunks", TwoChunks(chunk), rows),))
    whole = kw.Layer((kw.LayerCache("full", kw.Full(), rows),))
    return kw.ModelSpec("mine", (local, local, local, whole))


def main() -> None:
    spec = model(chunk=128)
    assert kw.ModelSpec.from_dict(spec.to_dict()) == spec  # JSON knows it too
    plan = kw.make_plan(spec, "64MiB", block_tokens=32)
    cache = kw.Cache(plan)
    prompt = range(1000)

    first = cache.open(prompt)
    while first.length < len(prompt):
        end = min(first.stop or len(prompt), len(prompt))
        list(cache.extend(first, end - first.length)), list(cache.commit(first))
    for tag in ("two_chunks", "full"):
        pages = cache.table(tag)[first.row, :32]
        print(f"{tag:10} holds {(pages > 0).sum():2} of 32 pages:", "".join("#" if page else "." for page in pages))
    cache.close(first)

    second = cache.open([*prompt[:900], *range(5000, 5100)])
    print(f"a prompt that shares 900 tokens goes on from {second.num_cached}, where both kinds have what they need")
    cache.close(second)


if __name__ == "__main__":
    main()
