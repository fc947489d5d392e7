"""`kvweave api`: an OpenAI-compatible endpoint over a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import typer

from kvweave.cli.run import run_options as option
from kvweave.errors import MissingExtra

_endpoint, _engine = (partial(typer.Option, rich_help_panel=title) for title in ("Endpoint", "Engine"))
KEY_VARIABLE = "KVWEAVE_API_KEY"

Host = Annotated[str, _endpoint(metavar="HOST", help="The address to listen on.")]
Port = Annotated[int, _endpoint(metavar="N", help="The port to listen on.")]
Name = Annotated[str | None, _endpoint(metavar="NAME", help="The model name that clients use.", show_default="MODEL")]
Budget = Annotated[int, _engine(metavar="N", help="Most tokens computed in one step.")]
Running = Annotated[int, _engine(metavar="N", help="Most requests computed at once; others wait.")]
Compile = Annotated[bool, _engine(help="On a GPU, compile the layers: slower first answers, faster ones after them.")]


def api_command(
    model: option.Model,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    memory: option.Memory = "1GiB",
    store: option.Store = None,
    weights: option.Weights = None,
    budget: Budget = 2048,
    max_running: Running = 64,
    compile: Compile = True,
    size: option.Size = "24M",
    seed: option.Seed = 0,
    dtype: option.Dtype = "auto",
    device: option.Device = "cpu",
    record: option.Record = None,
) -> None:
    """Serve a model to OpenAI clients: completions, chat, streams; many requests at once on one cache.

    If the environment variable KVWEAVE_API_KEY is set, clients must send its value as their key. SIGTERM and Ctrl-C
    stop the server once running answers have ended.

    [bold]Examples[/bold]

      kvweave api ./my-model --memory 8GiB --device cuda
      kvweave api ./my-model --store /var/tmp/kv --port 8080
      KVWEAVE_API_KEY=secret kvweave api qwen3-next-80b
      kvweave api ./my-model --record trace.jsonl, and later: kvweave simulate trace.jsonl --model ./my-model
    """
    with MissingExtra.on_import("kvweave api", "api"):
        from kvweave.cli.run.load_model import load  # noqa: PLC0415 - an extra
        from kvweave.engine import Engine  # noqa: PLC0415
        from kvweave.engine.api.endpoint import Endpoint  # noqa: PLC0415
        from kvweave.engine.api.serve_api import bind, serve_api  # noqa: PLC0415
        from kvweave.sim import TraceWriter  # noqa: PLC0415
    address = bind(host, port)  # before minutes of loading
    loaded = load(model, size=size, dtype=dtype, device=device, seed=seed)
    options: dict[str, Any] = {"budget": budget, "max_running": max_running, "store": store, "weights": weights}
    options["compile_layers"] = compile and loaded.model.device.type == "cuda"
    with ExitStack() as stack:
        writer = stack.enter_context(TraceWriter(record)) if record else None
        engine = stack.enter_context(
            Engine(loaded.model, memory, on_finish=writer.write_job if writer else None, **options)
        )
        endpoint = Endpoint(engine, codec_of(loaded.text), name or loaded.name, os.environ.get(KEY_VARIABLE))
        url = f"http://{host}:{address.getsockname()[1]}/v1"
        typer.echo(f"{loaded.name} at {url} as {name or loaded.name!r}; Ctrl-C ends it", err=True)
        serve_api(endpoint.app(), address, engine.close)


def codec_of(text: Any) -> Any:
    """The endpoint's codec of a loaded model."""
    from kvweave.cli.run.text import Tokenizer  # noqa: PLC0415 - needs nothing, but is used here only
    from kvweave.engine.api.prompt_codec import TokenizerCodec  # noqa: PLC0415 - an extra

    return TokenizerCodec(text.tokenizer) if isinstance(text, Tokenizer) else BytesCodec(text)


class BytesCodec:
    """Bytes, for models that never learned any tokens, and call no tools."""

    reads_tool_calls = False
    call_opening: str | None = None

    def __init__(self, text: Any) -> None:
        self._text = text
        self.encode, self.decode, self.token_bytes = text.encode, text.decode, text.token_bytes

    def chat(self, messages: Sequence[Any], tools: Sequence[Any] | None, opens_call: bool) -> list[int]:  # noqa: ARG002
        tokens: list[int] = self._text.chat([(each["role"], each.get("content") or "") for each in messages])
        return tokens

    def tool_calls(self, prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Any]) -> None:
        """There are none."""
