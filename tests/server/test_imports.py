"""The daemon and its clients need neither torch nor pickle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvweave

PROGRAM = """
import sys
for name in ("torch", "transformers", "redis", "obstore", "zmq"):
    sys.modules[name] = None  # importing it is an error
import kvweave.server.run
print(kvweave.server.Daemon.__name__)
"""


def test_the_server_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Daemon\n", "")


def test_nothing_is_pickled() -> None:
    for path in (Path(kvweave.__file__).parent / "server").rglob("*.py"):
        assert "pickle" not in path.read_text()
        assert "marshal" not in path.read_text()
