"""Outcomes in words and tables."""

from __future__ import annotations

from rich.table import Table

from kvweave.cli.run.outcome import RequestOutcome, RunOutcomes
from kvweave.cli.run.run_request import RunResult
from kvweave.cli.table import plain_table


def format_seconds(seconds: float) -> str:
    """`2.31 s`, `87 ms`."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1000:.0f} ms"


def format_speedup(faster: float | None) -> str:
    return "-" if faster is None else f"{faster:.1f}x"


def speed_words(faster: float) -> tuple[str, str]:
    """How many times, and which way: `("1.5x", "faster")`, `("1.4x", "slower")`, `("1.0x", "as fast")`."""
    times = f"{max(faster, 1 / faster):.1f}x"
    return times, "as fast" if times == "1.0x" else "faster" if faster > 1 else "slower"


def saved_words(seconds: float) -> tuple[str, str]:
    """`("3.00 s", "saved")`, `("1.61 s", "lost")`."""
    return format_seconds(abs(seconds)), "saved" if seconds >= 0 else "lost"


def format_reuse(outcome: RequestOutcome) -> str:
    """One request in a line."""
    stored = f" ({outcome.stored_tokens:,} from the store)" if outcome.stored_tokens else ""
    words = (
        f"{outcome.reused_tokens:,} of {outcome.prompt_tokens:,} prompt tokens reused{stored}, first token after"
        f" {format_seconds(outcome.first_token_seconds)}, all {outcome.new_tokens} after"
        f" {format_seconds(outcome.seconds)}"
    )
    if outcome.plain is None:
        return words
    equal = "all tokens equal" if outcome.is_equal else "TOKENS DIFFER"
    return f"{words}; without reuse {format_seconds(outcome.plain.first_token_seconds)}, {equal}"


def requests_table(outcomes: RunOutcomes, with_store: bool = False) -> Table:
    """A line a request; where there is a store, what came from memory and what from there."""
    heads = [">prompt\ntokens", *([">from\nmemory", ">from\nstore"] if with_store else [">\nreused"])]
    heads += [">\ncomputed", ">first\ntoken", ">\ntotal"]
    if outcomes.compared:
        heads += [">without reuse\nfirst token", ">without reuse\ntotal", ">\nspeedup", ">all tokens\nequal"]
    table = plain_table("\nrequest", *heads)
    for outcome in outcomes.each:
        table.add_row(outcome.who, *_cells(outcome, with_store))
    return table


def _cells(outcome: RequestOutcome, with_store: bool) -> list[str]:
    stored, reused = outcome.stored_tokens, outcome.reused_tokens
    found = (reused - stored, stored) if with_store else (reused,)
    cells = [f"{number:,}" for number in (outcome.prompt_tokens, *found, outcome.computed_tokens)]
    cells += [format_seconds(outcome.first_token_seconds), format_seconds(outcome.seconds)]
    if outcome.plain is None:
        return cells
    plain = outcome.plain
    equal = "yes" if outcome.is_equal else f"NO, from {plain.differs_at}"
    return [
        *cells,
        format_seconds(plain.first_token_seconds),
        format_seconds(plain.seconds),
        format_speedup(outcome.faster),
        equal,
    ]


def format_total(outcomes: RunOutcomes) -> list[str]:
    """What it came to, a sentence a line."""
    count = len(outcomes.each)
    if not count:
        return ["Nothing was asked."]
    lines = [
        f"{outcomes.reused_tokens:,} of {outcomes.prompt_tokens:,} prompt tokens were reused"
        f" ({outcomes.reused_share:.1%}); {outcomes.prompt_tokens - outcomes.reused_tokens:,} were computed."
    ]
    mean = format_seconds(outcomes.first_token_seconds / count)
    if outcomes.faster is None or outcomes.saved_seconds is None:
        return [*lines, f"The first token came after {mean} on average."]
    plain = format_seconds(outcomes.plain_first_token_seconds / count)
    lines.append(
        f"The first token came after {mean} on average, {plain} without reuse:"
        f" {' '.join(speed_words(outcomes.faster))}. {' '.join(saved_words(outcomes.saved_seconds))} in all."
    )
    if not outcomes.unequal:
        lines.append(
            f"All {outcomes.new_tokens:,} generated tokens are equal (log-probabilities within"
            f" {outcomes.logprob_difference:.1g})."
        )
    return lines


def format_store(result: RunResult) -> list[str]:
    """What came from the store and what went there, or why nothing did; what went wrong there, if anything did."""
    use = result.store
    if use is None or "declined" in use:
        return [f"Nothing was stored: {use['declined']}."] if use else []
    # The last token of an answer goes through no layer, so it has no KV.
    longest = max((each.prompt_tokens + each.new_tokens - 1 for each in result.outcomes.each), default=0)
    if longest < use["chunk_tokens"]:
        return [
            f"Nothing was stored: a store keeps whole chunks of {use['chunk_tokens']} tokens, and the longest prompt"
            f" with its answer has KV of {longest:,}."
        ]
    lines = [
        f"{use['loaded_tokens']:,} tokens came from the store {result.request.store} in"
        f" {format_seconds(use['load_seconds'])}; {use['stored']:,} blobs went there in"
        f" {format_seconds(use['save_seconds'])}."
    ]
    trouble = {
        "loads broke off: lost, damaged or late": use["shortened"],
        "hits found no room in memory": use["no_room"],
        "blobs were dropped": use["dropped"],
        "saves took too long": use["late"],
        "times it failed": use["failed"],
    }
    told = [f"{number:,} {what}" for what, number in trouble.items() if number]
    lines += [f"The store: {'; '.join(told)}."] if told else []
    if use["lost"] or use["last_error"]:
        reasons = ", ".join(f"{why} {number:,}" for why, number in use["lost"].items())
        lost = f"{sum(use['lost'].values()):,} blobs could not be stored in {result.request.store} ({reasons})"
        what = lost if reasons else f"{result.request.store} failed"
        lines.append(f"{what}; its last error: {use['last_error']}" if use["last_error"] else f"{what}.")
    return lines


def format_mismatches(outcomes: RunOutcomes, dtype: str) -> str:
    """The line of a failed comparison."""
    first = outcomes.unequal[0]
    at = first.plain.differs_at if first.plain else None
    hint = "" if dtype == "float32" else f"; in {dtype} near ties may fall either way: try --dtype float32"
    return (
        f"{len(outcomes.unequal)} of {len(outcomes.each)} answers differ from those without reuse, the first in"
        f" '{first.who}' at new token {at}{hint}"
    )
