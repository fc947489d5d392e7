"""`kvweave inspect`: what a daemon says of itself, for people and for programs."""

from __future__ import annotations

from pathlib import Path

from kvweave.server import Client, RemoteStore
from kvweave.server.metrics import metrics
from tests.cli.command import Kvweave
from tests.server.models import LARGEST, POINTS, SCHEMA, prompt, serving, settings, store, verify
from tests.store.models import truth


def test_it_shows_models_groups_tiers_prefixes_and_clients(kvweave: Kvweave, tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        for _ in range(3):
            client.load(client.lookup(prompt()), verify)
        hit = client.lookup(prompt(1))
        assert hit.position == 0
        client.lookup(prompt())
        run = kvweave("inspect", "--socket", str(tmp_path / "kv.sock"))
        assert (run.code, run.err) == (0, "")
        assert "5 lookups, 4,096 of 5,125 tokens found (79.9%)" in run.out
        assert "leases last 30 s; limits of a connection: 1 MiB reserved, 1 MiB pinned" in run.out
        lines = [line.split() for line in run.out.splitlines()]
        assert ["hybrid", "full", "full", "1", "4"] in [line[:5] for line in lines]
        assert ["window", "window", "300", "2", "4"] in [line[:5] for line in lines]
        assert ["state", "state", "3", "4"] in [line[:4] for line in lines]
        assert [prompt().prefixes[3].tobytes()[:8].hex(), "hybrid", "1,024", "4"] in lines
        found = kvweave("inspect", "--socket", str(tmp_path / "kv.sock"), "--json").json()
        assert found["tiers"][0]["tier"]["entries"] > 0
        assert [tier["kind"] for tier in found["description"]["tiers"]] == ["memory"]
        assert len(found["description"]["models"][0]["groups"]) == 3
        assert [each["leases"] for each in found["clients"] if each["name"] != "inspect"] == [1]
        assert round(found["hit_rate"], 3) == 0.799
        client.close()


def test_over_tcp_with_a_token(kvweave: Kvweave, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    (tmp_path / "wrong").write_text("barley")
    with serving(settings(tmp_path, listen="127.0.0.1:0", token_file=tmp_path / "token")) as daemon:
        there = ("inspect", "--connect", f"127.0.0.1:{daemon.ports[0]}", "--token-file")
        assert kvweave(*there, str(tmp_path / "token"), "--json").json()["pid"] > 0
        run = kvweave(*there, str(tmp_path / "wrong"))
        assert (run.code, run.out) == (2, "")
        assert "wrong token" in run.err


def test_nobody_there_is_one_line(kvweave: Kvweave, tmp_path: Path) -> None:
    run = kvweave("inspect", "--socket", str(tmp_path / "nobody"))
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert "no daemon at" in run.err
    assert "start one with `kvweave serve`, or say where it is with --socket" in run.err


def test_a_token_or_a_certificate_that_is_none_is_named(kvweave: Kvweave, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    for option, says in (("--token-file", "noise is no text, so no token"), ("--tls-ca", "noise cannot be used: ")):
        run = kvweave("inspect", "--connect", "127.0.0.1:1", option, str(tmp_path / "noise"))
        assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
        assert says in run.err


def test_names_of_clients_and_models_cannot_talk_to_a_terminal(kvweave: Kvweave, tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]x"
    with serving(settings(tmp_path)):
        client = RemoteStore(SCHEMA, Client(tmp_path / "kv.sock", name=evil), model=evil)
        client.lookup(prompt(0))
        run = kvweave("inspect", "--socket", str(tmp_path / "kv.sock"))
        assert run.code == 0
        assert "\x1b" not in run.out
        assert "\x07" not in run.out
        assert "[bold red]x" in run.out
        client.close()


def test_it_says_how_many_blobs_were_dropped_and_why_as_metrics_and_stats_do(kvweave: Kvweave, tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=LARGEST // 2)) as daemon, store(tmp_path / "kv.sock") as client:
        dropped = client.save(prompt(), truth, points=POINTS).dropped
        assert dropped > 0
        run = kvweave("inspect", "--socket", str(tmp_path / "kv.sock"))
        assert f"memory dropped {dropped} blobs: no room {dropped}\n" in run.out
        found = kvweave("inspect", "--socket", str(tmp_path / "kv.sock"), "--json").json()
        assert found["tiers"][0]["drops"] == client.stats().tiers[0].drops == {"no room": dropped}
        assert f'tier_dropped_total{{tier="memory",reason="no room"}} {dropped}\n' in metrics(daemon.report())
