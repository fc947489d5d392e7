"""Text to fill prompts with: seeded, plain, and different enough from one piece to the next."""

from __future__ import annotations

import json
from random import Random

NOUNS = (
    *("page", "table", "window", "prefix", "cache", "layer", "state", "block", "pool", "kernel", "token", "request"),
    *("tree", "policy", "budget", "harbour", "ledger", "engine", "river", "schedule", "archive", "signal", "column"),
    *("bridge", "market", "forecast", "parcel", "orchard", "turbine", "invoice", "telescope"),
)
VERBS = ("keeps", "finds", "shares", "moves", "counts", "returns", "delays", "measures", "copies", "replaces", "checks")
TOOLS = ("search_files", "read_file", "run_tests", "query_database", "send_message", "list_tickets", "plan_route")


def sentence(random: Random) -> str:
    first, second, third = random.sample(NOUNS, 3)
    return f"The {first} {random.choice(VERBS)} {random.randint(2, 99)} of the {second} before the {third} does. "


def tool(random: Random) -> str:
    """The description of a tool, as system prompts have them."""
    fields = {noun: {"type": random.choice(("string", "integer"))} for noun in random.sample(NOUNS, 2)}
    return json.dumps({"name": random.choice(TOOLS), "description": sentence(random), "parameters": fields}) + "\n"


def tool_result(random: Random) -> str:
    rows = [{noun: random.randint(0, 999) for noun in random.sample(NOUNS, 3)} for _ in range(2)]
    return json.dumps({"tool": random.choice(TOOLS), "rows": rows, "note": sentence(random)}) + "\n"


def question(random: Random) -> str:
    first, second = random.sample(NOUNS, 2)
    return f"What has the {first} to do with {random.randint(2, 99)} of the {second}, and why? "
