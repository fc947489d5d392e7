"""The `kvweave` command: its subcommands, and how it ends.

Whatever the user got wrong is one line on stderr and exit code 2; a traceback is a bug of ours. A reader that goes away
(`| head`) is exit code 1 without a word: rich and typer see to that. Ctrl-C is exit code 130, as in a shell.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from kvweave.cli.api_command import api_command
from kvweave.cli.clear import clear_command
from kvweave.cli.demo import demo_command
from kvweave.cli.examples import examples_command
from kvweave.cli.inspect import inspect_command
from kvweave.cli.plan_command import plan_command
from kvweave.cli.run.command import run_command
from kvweave.cli.serve import serve_command
from kvweave.cli.simulate.simulate_command import simulate_command
from kvweave.cli.version import version_line
from kvweave.errors import KVWeaveError


def _bare(params: list[Any]) -> list[Any]:
    """Flags are shown without a type: `--json`, not `--json <bool>`."""
    for param in params:
        param.metavar = "" if getattr(param, "is_flag", False) else param.metavar
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _bare(super().get_params(ctx))


class _Commands(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _bare(super().get_params(ctx))


app = typer.Typer(
    cls=_Commands,
    name="kvweave",
    help="A KV-cache engine for LLMs whose layers differ: say what each layer keeps, and memory follows.",
    epilog="Start with: kvweave plan qwen3-next-80b",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan_command,
    "run": run_command,
    "api": api_command,
    "serve": serve_command,
    "inspect": inspect_command,
    "simulate": simulate_command,
    "clear": clear_command,
    "demo": demo_command,
    "examples": examples_command,
}


def _help(command: Callable[..., None]) -> str:
    """A docstring whose paragraphs are one line each, which typer wraps to the terminal; indented lines stay lines."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(command) or "")


for _name, _function in COMMANDS.items():
    app.command(_name, cls=_Command, help=_help(_function))(_function)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(version_line())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command on `argv` (default: the process's) and exit: 0, 2 for a mistake of the user's, 130 for Ctrl-C, 1
    else."""
    try:
        code = app(args=argv, prog_name="kvweave", standalone_mode=False)
    except KVWeaveError as error:
        _fail(str(error))
    except MemoryError as error:
        _fail(f"this machine has too little memory for what was asked: {error}; ask for less, or smaller sizes")
    except OSError as error:
        _fail(f"cannot open {error.filename}: {error.strerror}" if error.filename else str(error))
    except typer.Abort as abort:
        if isinstance(abort.__cause__, EOFError):  # typer takes it for Ctrl-D; no command of ours asks through typer
            raise abort.__cause__ from None
        sys.exit(130)
    except Exception as error:
        _fail(_usage(error))
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Exception) -> str:
    """The sentence of a usage error; anything else is a bug and goes on as it came."""
    protocol = getattr(error, "format_message", None)  # click's errors, which typer keeps in a private module
    if protocol is None:
        raise error
    context = getattr(error, "ctx", None)
    said = protocol().rstrip(".")
    return f"{said}{' ' if said.endswith('?') else '; '}see {context.command_path if context else 'kvweave'} --help"


def _fail(message: str) -> NoReturn:
    print("kvweave: error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
