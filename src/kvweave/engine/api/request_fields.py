"""The fields of OpenAI's requests that are not served: without effect here, or refused by name; none in silence."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import Any, NamedTuple

from kvweave.engine.api.body import APIError, Body

WITHOUT_EFFECT = {
    "user": "names the end user",
    "safety_identifier": "names the end user",
    "metadata": "labels answers that are stored for later, which none is",
    "prompt_cache_key": "prefixes are shared whatever it says",
    "prompt_cache_options": "prefixes are shared whatever it says",
    "prompt_cache_retention": "prefixes stay as long as there is memory",
    "prediction": "a guess at the answer, to be faster; the answer is the same",
}
"""Fields that change no answer, and why."""


class Allowed(NamedTuple):
    """The values of a field that ask for nothing special, and what to do instead of any other."""

    values: tuple[Any, ...]
    cure: str


LEAVE_OUT = "leave it out"
UNCONSTRAINED = "answers are not constrained to a grammar; ask for the format in the messages, and check the answer"
ONLY = {
    "response_format": Allowed(({"type": "text"},), UNCONSTRAINED),
    "modalities": Allowed((["text"],), "answers are text"),
    "store": Allowed((False,), "answers are not stored here"),
    "service_tier": Allowed(("auto", "default"), "there is one tier; use `priority`"),
    "echo": Allowed((False,), "put the prompt before the answer yourself"),
    "suffix": Allowed(("",), "answers follow their prompt, and know of nothing behind them"),
    "functions": Allowed(([],), "use tools"),
    "function_call": Allowed(("none",), "use tool_choice"),
    "audio": Allowed((), "answers are text"),
    "web_search_options": Allowed((), "there is no search; offer one as a tool"),
    "reasoning_effort": Allowed((), LEAVE_OUT),
    "verbosity": Allowed((), "ask for it in the messages"),
    "moderation": Allowed((), "nothing is moderated here"),
}
"""Fields that are refused, but for values that ask for what is done anyway."""


def check_fields(body: Body, served: AbstractSet[str]) -> None:
    """Raise `APIError` for the first field that would be ignored, though it asks for something."""
    for name, value in body.fields.items():
        if name in served or name in WITHOUT_EFFECT:
            continue
        if name not in ONLY:
            near = get_close_matches(name, served, 1)
            hint = f"did you mean {near[0]}?" if near else LEAVE_OUT
            raise APIError(f"{name} is not a known field of this request: {hint}", code="unknown_parameter")
        if value not in ONLY[name].values:
            raise APIError(f"{name}={value!r} is not supported: {ONLY[name].cure}", code="unsupported_parameter")
