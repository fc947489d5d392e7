"""Two processes and one store: a directory one after the other, a daemon both at once; and a daemon that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvweave.integrations.transformers import KVWeave
from tests.integrations.models import difference, greedy, model_of, plain, prompt
from tests.integrations.stores import CLOSE, open_store_of
from tests.server.models import spawned

PROGRAM = """
import json, sys, torch, transformers
from kvweave.integrations.transformers import KVWeave
from tests.integrations.models import difference, greedy, model_of, plain, prompt
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
for name in ("gemma3_text", "qwen3_next"):
    model, ids = model_of(name), prompt(530)
    for store in sys.argv[1:]:
        with KVWeave(model, "64MiB", store=store, rows=8, max_tokens=1024) as weave:
            gap = difference(weave.generate(ids, **greedy()), plain(model, ids))
            print(json.dumps([name, gap, weave.records[-1].stored_tokens]))
"""


def sequence(name: str, store: object) -> KVWeave:
    return KVWeave(model_of(name), "64MiB", store=str(store), rows=8, max_tokens=1024)


def test_another_process_finds_what_this_one_left_in_a_directory_and_in_a_daemon(tmp_path: Path) -> None:
    socket, folder = tmp_path / "kv.sock", tmp_path / "kv"
    with spawned(socket, "--memory", "64MiB"):
        for name in ("gemma3_text", "qwen3_next"):
            for store in (folder, f"unix://{socket}"):
                with sequence(name, store) as weave:
                    weave.generate(prompt(530), **greedy())
        command = [sys.executable, "-c", PROGRAM, str(folder), str(socket)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == 4
    for name, gap, found in answers:
        assert (gap < CLOSE, found) == (True, 512), name


def test_a_daemon_that_is_killed_in_the_midst_of_an_answer_costs_no_token(tmp_path: Path) -> None:
    socket, name, other = tmp_path / "kv.sock", "gemma3_text", prompt(530, seed=9)
    with spawned(socket, "--memory", "64MiB") as daemon, sequence(name, socket) as weave:
        answer = weave.generate(prompt(530), streamer=_Killing(daemon), **greedy(12))
        assert difference(answer, plain(weave.model, prompt(530), num_tokens=12)) < CLOSE
        assert difference(weave.generate(other, **greedy()), plain(weave.model, other)) < CLOSE
        assert weave.records[-1].stored_tokens == 0
        assert open_store_of(weave).unreachable > 0


class _Killing:
    """Ends a daemon when the fifth token comes."""

    def __init__(self, daemon: subprocess.Popen[str]) -> None:
        self.daemon, self.heard = daemon, 0

    def put(self, _value: object) -> None:
        self.heard += 1
        if self.heard == 5:
            self.daemon.kill()
            self.daemon.wait()

    def end(self) -> None:
        pass
