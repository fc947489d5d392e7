"""`kvweave api`: an OpenAI-compatible endpoint over a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from kvweave.cli.run import run_options as option
from kvweave.errors import ConfigError

ENDPOINT, ENGINE = "Endpoint", "Engine"
KEY_VARIABLE = "KVWEAVE_API_KEY"

Host = Annotated[str, typer.Option(metavar="HOST", help="Where to listen.", rich_help_panel=ENDPOINT)]
Port = Annotated[int, typer.Option(metavar="N", help="The port.", rich_help_panel=ENDPOINT)]
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Its name for clients.", show_default="MODEL", rich_help_panel=ENDPOINT),
]
Budget = Annotated[int, typer.Option(metavar="N", help="Tokens a step, at most.", rich_help_panel=ENGINE)]
Running = Annotated[int, typer.Option(metavar="N", help="Requests that run at once, at most.", rich_help_panel=ENGINE)]


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
    size: option.Size = "24M",
    seed: option.Seed = 0,
    dtype: option.Dtype = "auto",
    device: option.Device = "cpu",
    record: option.Record = None,
) -> None:
    """Serve a model to OpenAI clients: completions, chat, streams; many requests at once on one cache.

    The key that clients must send is in the variable KVWEAVE_API_KEY, if it is set. SIGTERM and Ctrl-C let answers end.

    [bold]Examples[/bold]

      kvweave api ./my-model --memory 8GiB --device cuda
      kvweave api ./my-model --store /var/tmp/kv --port 8080
      KVWEAVE_API_KEY=secret kvweave api qwen3-next-80b
      kvweave api ./my-model --record trace.jsonl, and later: kvweave simulate trace.jsonl --model ./my-model
    """
    try:
        from kvweave.cli.run.load_model import load  # noqa: PLC0415 - an extra
        from kvweave.engine import Engine  # noqa: PLC0415
        from kvweave.engine.api.endpoint import Endpoint  # noqa: PLC0415
        from kvweave.engine.api.serve_api import serve_api  # noqa: PLC0415
        from kvweave.sim import TraceWriter  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'kvweave[api]'") from error
    loaded = load(model, size=size, dtype=dtype, device=device, seed=seed)
    options: dict[str, Any] = {"budget": budget, "max_running": max_running, "store": store, "weights": weights}
    with ExitStack() as stack:
        writer = stack.enter_context(TraceWriter(record)) if record else None
        engine = stack.enter_context(
            Engine(loaded.model, memory, on_finish=writer.write_job if writer else None, **options)
        )
        endpoint = Endpoint(engine, codec_of(loaded.text), name or loaded.name, os.environ.get(KEY_VARIABLE))
        typer.echo(f"{loaded.name} at http://{host}:{port}/v1 as {name or loaded.name!r}; Ctrl-C ends it", err=True)
        serve_api(endpoint.app(), host, port)


def codec_of(text: Any) -> Any:
    """The endpoint's codec of a loaded model."""
    from kvweave.cli.run.text import Tokenizer  # noqa: PLC0415 - needs nothing, but is used here only
    from kvweave.engine.api.prompt_codec import TokenizerCodec  # noqa: PLC0415 - an extra

    return TokenizerCodec(text.tokenizer) if isinstance(text, Tokenizer) else BytesCodec(text)


class BytesCodec:
    """Bytes, for models that never learned any tokens."""

    def __init__(self, text: Any) -> None:
        self._text = text
        self.encode, self.decode = text.encode, text.decode

    def chat(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> list[int]:  # noqa: ARG002
        tokens: list[int] = self._text.chat([(each["role"], each.get("content") or "") for each in messages])
        return tokens
