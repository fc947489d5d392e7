"""Settings: from text, from TOML, with errors that name what is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvweave.errors import ConfigError, KVWeaveError, PlanError, UnknownName
from kvweave.server import Disk, Limits, Settings
from kvweave.server.settings import read_token
from kvweave.store import Quota

WHOLE = """
memory = "2GiB"
disk = "/var/kv:10GiB"
socket = "/run/kv.sock"
lease_s = 5
[quotas.team-a]
floor = "1GiB"
[quotas.batch]
limit = "512MiB"
[limits]
sequences = 8
"""


def test_a_file_says_everything_that_options_say_and_more(tmp_path: Path) -> None:
    path = tmp_path / "kv.toml"
    path.write_text(WHOLE)
    read = Settings.read(path)
    assert read.memory == 2 << 30
    assert read.disk == Disk(Path("/var/kv"), 10 << 30)
    assert read.quotas == {"team-a": Quota(1 << 30), "batch": Quota(0, 512 << 20)}
    assert read.limits == Limits(sequences=8)
    assert read.changed(memory="1MiB", disk=None).memory == 1 << 20
    assert read.changed(memory="1MiB", disk=None).disk == read.disk


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memry = 1", "did you mean 'memory'"),
        ("memory = 'much'", "cannot read 'much'"),
        ("memory = 0", "more than 0"),
        ("disk = ''", "a directory is DIR or DIR:SIZE"),
        ("disk = 7", "expected text, got 7"),
        ("lease_s = 'long'", "expected a number"),
        ("lease_s = 0", "a lease of 0 s"),
        ("quotas = 4", "quotas must be a table"),
        ("[quotas.a]\nflor = 1", "did you mean 'floor'"),
        ("[limits]\nsequence = 1", "did you mean 'sequences'"),
        ("listen = '0.0.0.0:1'", "needs --token-file"),
        ("redis = 6379", "expected text, got 6379"),
        ("object = 7", "expected text, got 7"),
        ("objekt = 's3://a'", "did you mean 'object'"),
        ("tls_cert = 'a'", "go together"),
        ("[limits]\nrequests_per_s = 0", r"\[limits\] requests_per_s = 0: 1 to 1e\+09 is possible"),
        ("[limits]\nsequences = 1", r"\[limits\] sequences = 1: 2 to"),
        ("[limits]\nkeys = inf", r"\[limits\] keys = inf: 1 to"),
        ("[limits]\npin_share = nan", r"\[limits\] pin_share = nan: 0 to 1 is possible"),
        ("[limits]\nreserve_share = 5", r"\[limits\] reserve_share = 5: 0 to 1 is possible"),
        ("[quotas.a]\nfloor = 2\nlimit = 1", "a floor of 2 bytes and a limit of 1"),
        ("memory = ", "Invalid value"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "kv.toml"
    path.write_text(text)
    with pytest.raises(KVWeaveError, match=words):
        Settings.read(path)


def test_a_disk_may_have_a_colon_in_its_name() -> None:
    assert Disk.parse("/a:b:1GiB") == Disk(Path("/a:b"), 1 << 30)
    with pytest.raises(PlanError, match="DIR or DIR:SIZE"):
        Disk.parse(":1GiB")


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(UnknownName):
        Settings().changed(memori="1GiB")


def test_a_token_is_as_long_as_a_client_may_send(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t" * 200 + "\n")
    assert read_token(path) == "t" * 200
    path.write_text("t" * 201)
    with pytest.raises(ConfigError, match="a token of 201 characters: 1 to 200"):
        read_token(path)
