"""The `kvweave` fixture: a command and its outcome."""

from __future__ import annotations

import pytest

from kvweave.cli import main
from tests.cli.command import Kvweave, Run


@pytest.fixture
def kvweave(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvweave:
    """Runs the command as in a pipe: no terminal, and nothing in the environment that says how wide it is."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*argv: str) -> Run:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_of:
            main(argv)
        written = capsys.readouterr()
        return Run(exit_of.value.code, written.out, written.err)

    return run
