"""The how-to does what it says, with a daemon where it says there is one."""

from __future__ import annotations

import doctest
from pathlib import Path

from kvweave.server import Disk, Settings
from tests.server.models import serving, settings

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"


def test_every_example_does_what_it_says(tmp_path: Path) -> None:
    text = HOW_TO.read_text(encoding="utf-8").replace("/run/kvweave.sock", str(tmp_path / "kv.sock"))
    (tmp_path / "serve.md").write_text(text, encoding="utf-8")
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))):
        failed, tried = doctest.testfile(
            str(tmp_path / "serve.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
        )
    assert tried > 15
    assert not failed


def test_the_configuration_file_is_one(tmp_path: Path) -> None:
    text = HOW_TO.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    (tmp_path / "kv.toml").write_text(text)
    assert Settings.read(tmp_path / "kv.toml").quotas["batch"].limit_bytes == 512 << 20
