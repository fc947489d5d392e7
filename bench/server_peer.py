"""The peer of bench/server.py: LMCache 0.5.6's server and its own bench client, run by its interpreter. Prints JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
PORT, PAGE = 15_555, 18_080


def server(chunk: int) -> subprocess.Popen[bytes]:
    command = [
        os.path.join(os.path.dirname(sys.executable), "lmcache"), "server", "--port", str(PORT),
        "--http-port", str(PAGE), "--l1-size-gb", "4", "--eviction-policy", "LRU", "--chunk-size", str(chunk),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PAGE}/healthcheck", timeout=1)
        except OSError:
            time.sleep(0.2)
        else:
            return process
    process.kill()
    raise TimeoutError("the server does not come up")


def client(tokens: int) -> Any:
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient  # noqa: PLC0415
    from lmcache.cli.commands.bench.server_bench.config import BenchConfig  # noqa: PLC0415

    config = BenchConfig(
        f"tcp://localhost:{PORT}", f"http://localhost:{PAGE}", "cpu", "lmcache_driven", 1, False, tokens,
        "(2,300,16,8,128):bfloat16:32", 300, 16,
    )  # fmt: skip
    made = ServerBenchClient(config, lambda _: None)
    made.start()
    return made


def round_trip(bench: Any) -> float:
    """Microseconds of a no-op, the median."""
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        bench._req_client.noop().result(10)
        times.append(time.perf_counter() - began)
    return 1e6 * sorted(times)[len(times) // 2]


def transfers(bench: Any, rounds: int) -> dict[str, float]:
    """GB/s of stores and retrieves of 2,048 tokens, the best."""
    stores, loads = [], []
    for number in range(rounds):
        request = bench.create_request(number, f"r{number}", "bench")
        size = request.num_full_tokens * 32 * 2 * 8 * 128 * 2 / 1e9
        assert bench.lookup(request).is_full_miss
        began = time.perf_counter()
        assert bench.store(request, 0, request.num_full_tokens).succeeded
        stores.append(size / (time.perf_counter() - began))
        bench.end_session(request)
        again = found(bench, number)
        began = time.perf_counter()
        assert bench.retrieve(again, 0, again.num_full_tokens).succeeded
        loads.append(size / (time.perf_counter() - began))
        bench.end_session(again)
    return {"store": max(stores), "load": max(loads)}


def found(bench: Any, number: int) -> Any:
    """A request for what was stored, once the server sees all of it: a store is answered a moment before."""
    for attempt in range(100):
        request = bench.create_request(number, f"r{number}-{attempt}", "bench")
        if bench.lookup(request).is_full_hit:
            return request
        bench.end_session(request)
        time.sleep(0.05)
    raise TimeoutError("what was stored is not found")


def lookup(bench: Any, tokens: int) -> float:
    """Milliseconds of a lookup of so many tokens, which finds nothing: its cheapest case."""
    from lmcache.cli.commands.bench.server_bench import helpers  # noqa: PLC0415

    times = []
    for number in range(10):
        key = helpers._make_key((number, *range(1, tokens)), f"l{number}", 0, tokens)
        began = time.perf_counter()
        assert helpers._send_lookup(bench._req_client, key, tp_size=1)
        helpers._poll_prefetch_status(bench._req_client, key.request_id)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def main() -> None:
    wish = json.loads(sys.argv[1])
    process = server(wish["chunk"])
    try:
        bench = client(wish["tokens"])
        reply = {"round trip": round_trip(bench), **transfers(bench, wish["rounds"])}
        reply["lookup"] = lookup(bench, wish["lookup"])
        print(json.dumps(reply), flush=True)
    finally:
        process.terminate()
        process.wait(20)


main()
