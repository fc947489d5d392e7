"""A store behind a daemon as engines use it; and what is its own: round trips, connections, other processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvweave.operation import OperationState
from kvweave.server import Daemon, Disk, RemoteStore
from kvweave.store import BaseStore, DictTier, HashedPrompt, Saved, TierPolicy, TierStack
from kvweave.store.arena_tier import STEP_KEYS
from tests.server.models import POINTS, SCHEMA, prompt, serving, settings, spawned, store, verify
from tests.store.engine_contract import WAIT_S, EngineContract, Taken, polled, prompt_of
from tests.store.models import truth


class TestBehindADaemon(EngineContract):
    served: Daemon

    @pytest.fixture
    def daemon(self, tmp_path: Path) -> Iterator[Daemon]:
        with serving(settings(tmp_path)) as daemon:
            self.served = daemon
            yield daemon

    @pytest.fixture
    def store(self, daemon: Daemon) -> Iterator[RemoteStore]:
        made = store(daemon.settings.socket)
        yield made
        made.close()

    def one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvweave.server.save_operation.GATHER_BYTES", 1)

    def without_lease(self) -> dict[str, Any]:
        return {"lease": False}

    def lose(self, store: BaseStore[Any], prompt: HashedPrompt, chunk: int) -> None:
        assert store
        number = len(SCHEMA.shards)
        self.served.state.arena.delete(prompt.keys(SCHEMA.ids)[chunk * number : (chunk + 1) * number])


def test_many_prompts_are_looked_up_in_few_round_trips(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        for number in range(0, 40, 2):
            client.save(prompt(number), truth, points=[256])
        asked: list[int] = []
        exchange = client.client.exchange

        def counted(*args: Any, **more: Any) -> Any:
            asked.append(1)
            return exchange(*args, **more)

        client.client.exchange = counted  # type: ignore[method-assign]
        hits = client.submit_lookup([prompt(number) for number in range(40)]).result(WAIT_S)
        assert [hit.position for hit in hits] == [256, 0] * 20
        assert len(asked) == 3
        client.close()


class Slow(DictTier):
    """Takes its time to read."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.go_on, self.began = threading.Event(), threading.Event()

    def get(self, *args: Any) -> list[int]:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        return super().get(*args)


def test_lookups_do_not_wait_for_loads_that_wait_for_a_tier(tmp_path: Path) -> None:
    tier = Slow()
    backing = TierStack((tier, TierPolicy(write="back", deadline_s=WAIT_S)))
    with serving(settings(tmp_path), backing) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=[1024])
        client.save(prompt(1), truth, points=[1024])
        assert client.flush()
        daemon.state.arena.delete(prompt(0).keys(SCHEMA.ids))
        hit = client.lookup(prompt(0))
        assert hit.position == 1024
        load = client.submit_load(hit, verify)
        assert tier.began.wait(WAIT_S)
        assert client.submit_lookup([prompt(1)]).result(5)[0].position == 1024
        assert client.submit_save(prompt(2), truth, points=[512]).result(5).dropped == 0
        assert not load.is_done
        tier.go_on.set()
        assert load.result(WAIT_S) == 1024
        client.close()
        assert _eventually(lambda: not daemon.report().clients), "its connections end with it"


def test_what_was_submitted_to_a_frozen_daemon_ends_without_a_budget(tmp_path: Path) -> None:
    """By the heartbeat, which connections beside the store's own see as well."""
    with spawned(tmp_path / "kv.sock", "--memory", "4MiB") as process:
        client = store(tmp_path / "kv.sock")
        assert client.submit_save(prompt(0), truth, points=POINTS).result(WAIT_S).dropped == 0
        hit = client.lookup(prompt(0), lease=False)
        assert client.submit_load(hit, verify).result(WAIT_S) == 1024
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        load, save = client.submit_load(hit, verify), client.submit_save(prompt(1), truth, points=POINTS)
        assert load.result(WAIT_S) == 0
        assert save.result(WAIT_S) == Saved(dropped=len(save.failed))
        assert time.monotonic() - began < 6, "nobody looked at the heartbeat"
        process.send_signal(signal.SIGCONT)
        assert _eventually(lambda: client.submit_load(hit, verify).result(WAIT_S) == 1024)
        client.close()


def _eventually(holds: Any) -> bool:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.005)
    return False


def test_what_was_submitted_to_a_daemon_that_died_is_a_miss_and_the_next_one_is_used(tmp_path: Path) -> None:
    socket, disk = tmp_path / "kv.sock", f"{tmp_path / 'disk'}:64MiB"
    options = ("--memory", "4MiB", "--disk", disk)
    with spawned(socket, *options) as process:
        client = store(socket)
        assert client.submit_save(prompt(0), truth, points=POINTS).result(WAIT_S).dropped == 0
        assert client.submit_load(client.lookup(prompt(0)), verify).result(WAIT_S) == 1024
        assert client.flush()
        process.kill()
        process.wait()
        lost = client.submit_save(prompt(1), truth, points=POINTS)
        assert lost.result(WAIT_S).stored == 0
        assert lost.failed
        assert client.submit_lookup([prompt(0)]).result(WAIT_S)[0].position == 0
    with spawned(socket, *options):
        assert _eventually(lambda: client.submit_save(prompt(2), truth, points=[512]).result(WAIT_S).stored)
        assert client.submit_lookup([prompt(0)]).result(WAIT_S)[0].position == 1024
        assert client.submit_load(client.lookup(prompt(0)), verify).result(WAIT_S) == 1024
        assert client.submit_save(prompt(1), truth, points=POINTS).result(WAIT_S).dropped == 0
        assert client.load(client.lookup(prompt(1)), verify) == 1024
        client.close()


class SlowIndex(DictTier):
    """Takes its time to say what it has."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.go_on, self.began = threading.Event(), threading.Event()
        self.go_on.set()

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        return super().contains(keys)


def test_a_cancelled_lookup_holds_nothing(tmp_path: Path) -> None:
    tier = SlowIndex()
    with serving(settings(tmp_path), TierStack((tier, TierPolicy(deadline_s=WAIT_S)))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt_of(client), truth, points=[1024])
        assert client.flush()
        tier.go_on.clear()
        tier.began.clear()
        lookup = client.submit_lookup([prompt_of(client, tokens=2000)])  # of which the arena has the first half
        assert tier.began.wait(WAIT_S)
        assert lookup.cancel()
        tier.go_on.set()
        assert polled(client, 1) == [lookup]
        assert lookup.state is OperationState.CANCELLED
        assert not daemon.state.arena._catalog.pins.any()
        client.close()


def test_what_was_brought_for_a_load_is_let_go(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon, store(tmp_path / "kv.sock") as client:
        client.save(prompt(0), truth, points=POINTS)
        sink = Taken()
        sink.go_on.clear()
        load = client.submit_load(client.lookup(prompt(0), lease=False), sink)
        assert sink.began.wait(WAIT_S)
        assert daemon.state.arena._catalog.pins.any()
        load.cancel()
        sink.go_on.set()
        assert polled(client, 1) == [load]
        assert _eventually(lambda: not daemon.state.arena._catalog.pins.any())


def test_a_commit_after_the_lease_keeps_nothing(tmp_path: Path) -> None:
    with serving(settings(tmp_path, lease_s=0.2)):
        client = store(tmp_path / "kv.sock")
        gathered = client.gather(prompt(0), truth, points=[512])
        assert gathered.failed == ()
        time.sleep(0.6)
        saved = gathered.commit()
        assert (saved.stored, saved.dropped) == (0, len(gathered.failed))
        assert client.lookup(prompt(0)).position == 0
        assert client.save(prompt(0), truth, points=[512]).dropped == 0
        client.close()


def test_what_is_gathered_and_not_committed_ends_with_its_process(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, other = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        gathered = client.gather(prompt(0), truth, points=[512])
        assert other.save(prompt(0), truth, points=[512]) == Saved(
            dropped=len(client._to_keep(prompt(0), truth, [512], None, 0))
        )
        client.close()
        assert _eventually(lambda: not daemon.state.arena._writing)
        assert gathered.commit().stored == 0
        assert other.save(prompt(0), truth, points=[512]).stored
        other.close()


WORKER = """
import sys
from tests.server.models import SCHEMA, store, verify
worker, rank = store(sys.argv[1]), int(sys.argv[2])
ticket = bytes.fromhex(sys.stdin.read())
hit = worker.redeem(ticket)
print(worker.load(hit, verify, shards=SCHEMA.read_by(2, rank)), worker.stats().lookups)
worker.close()
"""


def test_workers_of_all_ranks_load_what_one_lookup_found(tmp_path: Path) -> None:
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))) as daemon:
        scheduler = store(tmp_path / "kv.sock")
        scheduler.save(prompt(0), truth, points=POINTS)
        hit = scheduler.lookup(prompt(0))
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(tmp_path / "kv.sock"), str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        told = [worker.communicate(hit.ticket().hex(), timeout=60)[0] for worker in workers]
        assert told == ["1024 0\n"] * 2
        assert daemon.report().lookups == 1
        scheduler.release(hit)
        assert _eventually(lambda: not daemon.state.arena._catalog.pins.any())
        scheduler.close()


def test_what_is_redeemed_stays_while_the_lookup_holds_it(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        scheduler, worker = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        scheduler.save(prompt(0), truth, points=POINTS)
        ticket = scheduler.lookup(prompt(0)).ticket()
        for number in range(1, 12):  # twice the arena
            scheduler.save(prompt(number), truth, points=POINTS)
        assert worker.load(worker.redeem(ticket), Taken()) == 1024
        scheduler.close()
        worker.close()


def test_hits_and_pins_are_contexts_that_let_go(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon, store(tmp_path / "kv.sock") as client:
        client.save(prompt(0), truth, points=POINTS)
        pins = daemon.state.arena._catalog.pins
        with client.lookup(prompt(0)) as hit:
            assert hit.position == 1024
            assert pins.any()
        assert not pins.any()
        with client.pin(client.lookup(prompt(0), lease=False)) as pinned:
            assert pinned.position == 1024
            assert pins.any()
        assert not pins.any()


def test_a_long_prompt_goes_through_as_well(tmp_path: Path) -> None:
    """More keys than the daemon looks at in one step."""
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        tokens = (STEP_KEYS // len(SCHEMA.shards) + 2) * SCHEMA.chunk_tokens + 1
        short, long = prompt_of(client), prompt_of(client, tokens=tokens)
        client.save(short, truth, points=[1024])
        assert [hit.position for hit in client.submit_lookup([long, short]).result(WAIT_S)] == [1024, 1024]
        client.close()
