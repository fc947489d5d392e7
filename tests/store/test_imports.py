"""The store needs no torch, and neither do the tiers of one machine need a client of anything."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
for name in ("torch", "redis", "obstore", "mooncake"):
    sys.modules[name] = None  # importing it is an error
import kvweave.store
print(kvweave.store.Store.__name__)
"""


def test_the_store_imports_without_torch_and_without_clients() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Store\n", "")
