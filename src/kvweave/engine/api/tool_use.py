"""Which tools an answer may call, and whether it has to, as a request's `tool_choice` says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvweave.engine.api.body import APIError, Body
from kvweave.engine.api.prompt_codec import PromptCodec, ToolCalls
from kvweave.engine.engine_request import Result


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The `tools` of a request. With `must_call` an answer calls one of them, with `one_call` no more than one."""

    tools: list[Any] = field(default_factory=list)
    must_call: bool = False
    one_call: bool = False

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def read_calls(self, codec: PromptCodec, answer: Result) -> ToolCalls | None:
        """The calls in an answer, if there are any; `APIError` if there had to be."""
        found = codec.tool_calls(answer.prompt, answer.tokens, self.tools)
        if self.must_call and (not found or not {call.name for call in found.calls} <= set(self.names)):
            raise APIError(
                f"the model was to call one of {self.names}, and wrote no such call in {len(answer.tokens)} tokens",
                500,
                "no_tool_call",
            )
        return found._replace(calls=found.calls[:1]) if found and self.one_call else found


def tool_use(body: Body, codec: PromptCodec) -> ToolUse:
    """As `tools`, `tool_choice` and `parallel_tool_calls` say; `APIError` if that cannot be done with this model."""
    tools: list[Any] = body.get("tools", (list,), [])
    if not all(_is_function(tool) for tool in tools):
        raise APIError("tools is a list of objects {'type': 'function', 'function': {'name': ...}}")
    use = ToolUse(tools, one_call=not body.flag("parallel_tool_calls", True))
    if use.one_call and tools and not codec.reads_tool_calls:
        raise APIError("parallel_tool_calls=false: this model's tokenizer has no response_template to tell calls apart")
    choice = body.get("tool_choice", (str, dict), "auto")
    if choice == "auto":
        return use
    return ToolUse() if choice == "none" else _forced(use, choice, codec)


def _forced(use: ToolUse, choice: Any, codec: PromptCodec) -> ToolUse:
    """A call is required: of any tool, or of the one that is named; the model is then told of no other."""
    if choice != "required" and not _is_function(choice):
        raise APIError(f"tool_choice is 'none', 'auto', 'required' or an object that names a function, not {choice!r}")
    if codec.call_opening is None:
        raise APIError(
            f"tool_choice={choice!r} is not supported: the tokenizer of this model does not say how a call opens"
            " (response_template, fields.tool_calls.open); use 'auto', and ask for a call in the messages",
            code="unsupported_parameter",
        )
    name = None if choice == "required" else choice["function"]["name"]
    tools = [tool for tool in use.tools if name in (None, tool["function"]["name"])]
    if not tools:
        raise APIError(f"tool_choice={choice!r} asks for none of the tools {use.names}")
    return replace(use, tools=tools, must_call=True)


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
