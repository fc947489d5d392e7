"""The engine's statistics for Prometheus."""

from __future__ import annotations

from kvweave.engine.worker import EngineStats

GAUGES = {"running": "Requests that run.", "waiting": "Requests that wait."}
COUNTERS = {
    "requests": "Requests that came.",
    "finished": "Requests that ended, cancelled ones among them.",
    "steps": "Steps that were computed.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were found in the cache or the store.",
    "new_tokens": "Tokens that were generated.",
    "preemptions": "Requests that lost their pages to others, and went on later.",
}


def exposition(stats: EngineStats) -> str:
    """The text that Prometheus reads."""
    lines = []
    for kind, names, end in (("gauge", GAUGES, ""), ("counter", COUNTERS, "_total")):
        for name, text in names.items():
            full = f"kvweave_engine_{name}{end}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {getattr(stats, name)}"]
    for state in ("free", "held", "cached"):
        full = f"kvweave_engine_pages_{state}"
        lines += [f"# HELP {full} Pages of a group that are {state}.", f"# TYPE {full} gauge"]
        lines += [f'{full}{{group="{group.tag}"}} {getattr(group, state)}' for group in stats.core.groups]
    return "\n".join(lines) + "\n"
