"""The body of an API request: JSON fields, checked by type; an error names the field."""

from __future__ import annotations

import json
from typing import Any

from kvweave.engine.sampling import Sampling
from kvweave.errors import BadOption, KVWeaveError

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGE = 1000
"""Characters of an error's text."""


class APIError(KVWeaveError):
    """An answer with an HTTP status and a code, as OpenAI's clients know them."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        text = message if len(message) <= MOST_MESSAGE else f"{message[:MOST_MESSAGE]}..."  # may quote a whole body
        super().__init__(text.encode(errors="backslashreplace").decode())  # may quote half a surrogate pair
        self.status, self.code = status, code

    def to_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Body:
    """The fields of a request; a field that is null counts as not given."""

    def __init__(self, raw: bytes) -> None:
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise APIError(f"the body is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise APIError(f"the body is a JSON object, not {type(fields).__name__}")
        self.fields: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}

    def get(self, name: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        value = self.fields.get(name, default)
        if name in self.fields and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise APIError(f"{name} must be {wanted}, not {type(value).__name__}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, (int, float), default)
        try:
            return float(value)
        except OverflowError as error:
            raise APIError(f"{name} is far too large") from error

    def integer(self, name: str, default: int | None) -> int | None:
        value: int | None = self.get(name, (int,), default)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, (bool,), default))

    @property
    def num_choices(self) -> int:
        count = self.integer("n", 1) or 0
        if not 1 <= count <= MOST_CHOICES:
            raise APIError(f"n is from 1 to {MOST_CHOICES}, not {count}")
        return count

    @property
    def stops(self) -> tuple[str, ...]:
        given = self.get("stop", (str, list), [])
        stops = [given] if isinstance(given, str) else given
        if len(stops) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
            raise APIError(f"stop is a string, or a list of at most {MOST_STOPS} strings, none of them empty")
        return tuple(stops)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.get("stream_options", (dict,), {})
        if others := [name for name, value in options.items() if value and name != "include_usage"]:
            raise APIError(f"stream_options: {', '.join(others)} is not supported, only include_usage")
        return bool(options.get("include_usage"))

    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        """Token ids, which JSON has as strings, and what is added to their logits."""
        given = self.get("logit_bias", (dict,), {})
        try:
            return tuple((int(token), float(bias)) for token, bias in given.items())
        except (TypeError, ValueError, OverflowError) as error:
            raise APIError(f"logit_bias is an object of token ids and numbers: {error}") from error

    def sampling(self, max_new_tokens: int, logprobs: int | None, choice: int) -> Sampling:
        """As OpenAI's fields say; top_k, min_p and repetition_penalty beside them. Choices have seeds of their own."""
        seed = self.integer("seed", None)
        try:
            return Sampling(
                max_new_tokens,
                temperature=self.number("temperature", 1.0),
                top_p=self.number("top_p", 1.0),
                top_k=self.integer("top_k", 0) or 0,
                min_p=self.number("min_p", 0.0),
                repetition_penalty=self.number("repetition_penalty", 1.0),
                frequency_penalty=self.number("frequency_penalty", 0.0),
                presence_penalty=self.number("presence_penalty", 0.0),
                logit_bias=self.logit_bias,
                seed=None if seed is None else (seed + choice) % 2**63,
                logprobs=logprobs,
            )
        except BadOption as error:
            raise APIError(str(error)) from error
