"""One name, one meaning: no class and no file name of the source is there twice, and replaced words stay away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "names.py"


def test_no_name_is_defined_twice_and_no_replaced_word_returned() -> None:
    found = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("", 0), found.stdout + found.stderr
