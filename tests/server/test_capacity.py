"""More than fits: room is made on demand, for everybody, and no store is dropped while something may go."""

from __future__ import annotations

import threading
from pathlib import Path

from kvweave.store import Saved
from tests.server.models import POINTS, prompt, prompt_bytes, serving, settings, store, verify
from tests.store.models import truth

CLIENTS, EACH = 4, 12


def test_four_times_the_arena_offered_at_once_drops_nothing(tmp_path: Path) -> None:
    room = CLIENTS * EACH * prompt_bytes() // 4
    with serving(settings(tmp_path, memory=room)) as daemon:
        results: list[Saved] = []

        def work(first: int) -> None:
            client = store(tmp_path / "kv.sock")
            for number in range(first, first + EACH):
                results.append(client.save(prompt(number), truth, points=POINTS))
                hit = client.lookup(prompt(number))
                assert client.load(hit, verify) == hit.position
            client.close()

        threads = [threading.Thread(target=work, args=(first * EACH,)) for first in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == CLIENTS * EACH
        assert sum(result.dropped for result in results) == 0
        tier = daemon.report().tiers[0].tier
        assert tier.evicted > 0
        assert (tier.used_bytes or 0) > 0.9 * room
        assert not daemon.state.arena.is_held


def test_a_writer_waits_for_room_that_others_only_hold_for_a_moment(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=prompt_bytes())):
        reader, writer = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        reader.save(prompt(0), truth, points=POINTS)
        hit = reader.lookup(prompt(0))
        timer = threading.Timer(0.3, reader.release, [hit])
        timer.start()
        assert writer.save(prompt(1), truth, points=[1024]).dropped == 0
        timer.join()
        reader.close()
        writer.close()
