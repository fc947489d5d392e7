"""`kvweave demo --plan`: eight hybrids on one page, beside the scheme that pads every group to one page size."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from kvweave.cli.format import exact, format_size
from kvweave.cli.plan_request import PlanRequest, PlanResult, answer
from kvweave.cli.read_config import written
from kvweave.cli.svg import plan_svg
from kvweave.cli.table import console, plain_table, print_table
from kvweave.plan import one_page_size
from kvweave.plan.plan import TYPICAL_TOKENS

MODELS = (
    "gemma-3-27b",
    "llama-4-scout",
    "qwen3-next-80b",
    "nemotron-h-56b",
    "falcon-h1-34b",
    "kimi-linear-48b",
    "deepseek-v3.2",
    "deepseek-v4-flash",
)
"""Window, chunk, states, states that are huge, both in one layer, states and latents, a sparse indexer, all at once."""
DRAWN = "qwen3-next-80b"
_COMPARED = ("32k sequences", "padding", "reuse steps")


def plan_demo(folder: Path) -> None:
    """Plan eight bundled models for 80 GiB, compare, and draw one of them into `folder`."""
    answers = {name: answer(PlanRequest(name)) for name in MODELS}
    out = console()
    out.print("Eight models, 80 GiB each: one pool, and each group keeps its own page size.", style="bold")
    out.print()
    print_table(out, _table(answers))
    out.print()
    out.print(
        f'"one size" pads every group to one page size, as most engines do; padding and sequences are those of'
        f" {TYPICAL_TOKENS:,} tokens. Prefixes are shared in these steps of tokens: the smaller, the more is shared."
    )
    out.print()
    path = written(folder / f"kvweave-plan-{DRAWN}.svg", plan_svg(answers[DRAWN]))
    out.print(f"A picture of {DRAWN} is in {path.resolve()}", soft_wrap=True)
    out.print(f"Go on with:  kvweave plan {DRAWN} --explain")


def _table(answers: dict[str, PlanResult]) -> Table:
    compared = (f">{what}\nhere / one size" for what in _COMPARED)
    table = plain_table("\nmodel", "~\ngroups (layers)", ">bytes\na token", ">fixed bytes\na sequence", *compared)
    for name, found in answers.items():
        table.add_row(name, *_cells(found))
    return table


def _cells(found: PlanResult) -> list[str]:
    plan = found.plan
    usual = one_page_size(plan)
    return [
        ", ".join(f"{group.tag} ({len(group.layers)})" for group in plan.groups),
        f"{exact(plan.bytes_per_token()):,}",
        format_size(plan.window_bytes() + plan.state_bytes()),
        f"{plan.sequences(TYPICAL_TOKENS):,} / {plan.memory // usual.bytes_per_sequence:,}",
        f"{plan.padding_share():.2%} / {usual.padding_share:.2%}",
        f"{plan.reuse_tokens:,} / {usual.reuse_tokens:,}",
    ]
