"""What a picture of the memory shows it filled with."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.cli.format import count
from kvweave.plan import Group, Plan, Pool


@dataclass(frozen=True, slots=True)
class SampleLoad:
    """A number of sequences of one length."""

    num_tokens: int
    sequences: int

    @classmethod
    def of(cls, plan: Plan, num_tokens: int) -> SampleLoad:
        """As many as fit; shorter ones where not even one does."""
        while num_tokens > 1 and not plan.sequences(num_tokens):
            num_tokens //= 2
        return cls(num_tokens, plan.sequences(num_tokens))

    def superpages(self, group: Group) -> int:
        """Super-pages that all of them hold of one group."""
        pages = group.num_blocks_held(self.num_tokens) * self.sequences
        return -(-pages // group.pages_per_superpage)

    def __str__(self) -> str:
        return f"{count(self.sequences, 'sequence')} of {count(self.num_tokens, 'token')}"


def members(plan: Plan, pool: Pool) -> list[Group]:
    """The groups of a pool."""
    return [plan.group(tag) for tag in pool.tags]
