"""On an H200, pages are gathered at 90% of a device copy's bandwidth, and stored at 98% of a flat pinned copy's.

Chunks of 256 tokens, block 16, random pages; what moves is what a hit at the end of the chunks needs. Ceilings are
measured in the same run, on the same number of bytes. The peer is LMCache 0.5.6, whose figures were measured with its
own kernels on the same kind of machine, and not here; there are none for the mixes. `ratio` is how many times better
ours is.

Run: python -m bench.transfer          (needs an NVIDIA GPU; make bench NAME=transfer)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from kvweave import from_config, make_plan
from kvweave.plan import Layout, Plan
from kvweave.spec import ModelSpec
from kvweave.tensor import GQA, MLA, Arena, LayerRequest, Opaque, assemble
from kvweave.transfer import ChunkLayout, CopyJob, CopyPlan, Direction, Mover, Transfer, needed
from kvweave.transfer.copier import ChunkBuffer

CHUNK = 256
BLOCK = 16
PEER = "LMCache 0.5.6, measured on an H200, not here"
PEERS = {
    ("gqa", 1): {"gather": 826, "scatter": 842, "store": 50.1, "load": 49.6},
    ("gqa", 16): {"gather": 1343, "scatter": 1339, "store": 51.7, "load": 52.9},
    ("mla+indexer", 1): {"gather": 620, "scatter": 631, "store": 49.8, "load": 50.2},
    ("mla+indexer", 16): {"gather": 1002, "scatter": 1006, "store": 49.8, "load": 51.6},
}


def models() -> dict[str, ModelSpec]:
    examples = files("kvweave") / "examples"
    both = [(MLA(), LayerRequest(layer)) for layer in range(61)]
    both += [(Opaque(132), LayerRequest(layer)) for layer in range(61)]  # type: ignore[misc]
    return {
        "gqa": assemble("gqa", [(GQA(), LayerRequest(layer, heads=8)) for layer in range(32)]),
        "mla+indexer": assemble("mla", both),
        "gemma-3": from_config(str(examples / "gemma-3-27b.json")),
        "qwen3-next": from_config(str(examples / "qwen3-next-80b.json")),
    }


@dataclass
class Case:
    """Some chunks of a model on the device, the buffers they go to, and others like them."""

    name: str
    num_chunks: int
    layout: ChunkLayout
    copies: list[CopyPlan]
    arena: Arena
    chunks: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return self.copies[0].num_bytes


def case(name: str, made: Plan, arena: Arena, num_chunks: int, sets: int) -> Case:
    layout = ChunkLayout.of(made, CHUNK)
    rng = np.random.default_rng(0)
    supers = {pool.name: (1 + rng.permutation(pool.num_superpages - 1)).tolist() for pool in made.pools}
    copies = []
    for _ in range(sets):
        tables = {}
        for part in layout.groups:
            group = made.group(part.tag)
            count = num_chunks * (part.num_blocks if group.cache.reach.per_token else 1)
            taken = [supers[group.pool].pop() for _ in range(-(-count // group.pages_per_superpage))]
            size = group.pages_per_superpage
            pages = np.concatenate([np.arange(size) + s * size for s in taken])
            tables[part.tag] = rng.permutation(pages)[:count]
        copies.append(needed(layout, tables, num_chunks * CHUNK))
    chunks = [torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True) for _ in copies[0].chunks]
    return Case(name, num_chunks, layout, copies, arena, chunks)


# ---- time


def walls(acts: list[Callable[[], Any]], times: int = 15) -> list[float]:
    """Median seconds of calls that return when all that they started is over. In turn, so that all see the same PCIe,
    which the machine shares with others; each twice, so that all find their memory in the host's cache, or none."""
    taken: list[list[float]] = [[] for _ in acts]
    for _ in range(times + 3):
        for act, mine in zip(acts, taken, strict=True):
            act()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            act()
            mine.append(time.perf_counter() - begun)
    return [statistics.median(mine[3:]) for mine in taken]


def back_to_back(acts: list[Callable[[], Any]], rounds: int = 6) -> float:
    """Seconds of one of several acts on one stream, one after the other, so that none waits for the host."""
    for act in acts:
        act()
    best: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # the host gets ahead meanwhile
        start.record()
        for _ in range(rounds):
            for act in acts:
                act()
        end.record()
        torch.cuda.synchronize()
        best.append(start.elapsed_time(end) * 1e-3 / (rounds * len(acts)))
    return statistics.median(best)


# ---- figures


def tell(claim: str, ours: float, ceiling: float, goal: float, peer: float | None) -> None:
    line: dict[str, Any] = {"claim": claim, "ours": round(ours, 1), "unit": "GB/s"}
    if peer is not None:
        line |= {"peer": peer, "ratio": round(ours / peer, 3), "peer_is": PEER}
    share = ours / ceiling
    print(
        json.dumps(line | {"ceiling": round(ceiling, 1), "share": round(share, 3), "goal": goal, "met": share >= goal})
    )
    sys.stdout.flush()


def launches(one: Case, *, gather: bool) -> list[Callable[[], None]]:
    """Launches of the kernel alone, each for pages of its own, the tables on the device already."""
    from kvweave.transfer.command_buffer import CommandBuffer  # noqa: PLC0415
    from kvweave.transfer.copy_templates import CopyTuning  # noqa: PLC0415
    from kvweave.transfer.cuda_copier import CUDACopier  # noqa: PLC0415  (Triton is there with CUDA only)
    from kvweave.transfer.driver import context_of, submit  # noqa: PLC0415
    from kvweave.transfer.kernel import launch  # noqa: PLC0415

    made: list[Callable[[], None]] = []
    copier = CUDACopier(tuning=CopyTuning(packed_bytes=1 << 40, recorded_bytes=0))
    for copies in one.copies:
        chunks = [torch.empty(one.layout.num_bytes, dtype=torch.uint8, device="cuda") for _ in copies.chunks]
        job = CopyJob(
            one.arena, copies, tuple(map(ChunkBuffer.of, chunks)), Direction.STORE if gather else Direction.LOAD
        )
        prepared = copier.prepare(job).prepared
        (bound,) = prepared.bound_copies
        stream, commands = torch.cuda.current_stream(), CommandBuffer()
        where = stream.cuda_stream, stream.device_index
        launch(commands, bound.table_at, bound.template.num_tiles, bound.vector_bytes, 0, *where, gather=gather)
        commands.keep((prepared, chunks))
        made.append(partial(submit, commands, context_of(stream.device_index)))
    return made


def kernels(one: Case) -> None:
    """Gather and scatter alone, chunks on the device; several sets of pages in turn, so that L2 is no help."""
    size = one.num_bytes
    source = torch.empty(8 * size, dtype=torch.uint8, device="cuda").random_()
    flat = torch.empty(8 * size, dtype=torch.uint8, device="cuda")
    pairs = [(flat[i * size : (i + 1) * size], source[(7 - i) * size : (8 - i) * size]) for i in range(8)]
    ceiling = size / back_to_back([partial(to.copy_, at) for to, at in pairs]) / 1e9
    del source, flat
    for direction in ("gather", "scatter"):
        speed = size / back_to_back(launches(one, gather=direction == "gather")) / 1e9
        claim = f"{direction}, {one.name}, {one.num_chunks} chunks of {CHUNK} ({size / 1e6:.0f} MB)"
        tell(claim, speed, ceiling, 0.9, PEERS.get((one.name, one.num_chunks), {}).get(direction))


def moves(one: Case, label: str) -> None:
    """Store and load, from the call to the last byte: as planned and checked before, and with all that included."""
    size, goal = one.num_bytes, 0.98 if one.num_chunks > 1 else 0.95
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    buffers = [ChunkBuffer.of(chunk) for chunk in one.chunks]
    with Mover(one.arena, background=False) as mover:
        check(one, mover)
        for direction, flat in (
            (Direction.STORE, partial(_copy, host, device)),
            (Direction.LOAD, partial(_copy, device, host)),
        ):
            job = mover.prepare(one.copies[0], buffers, direction)
            ready, whole = partial(mover.start, job), partial(getattr(mover, direction), one.copies[0], buffers)
            took = walls([flat, partial(_see_through, ready), partial(_see_through, whole)])
            ceiling, prepared, unprepared = (size / seconds / 1e9 for seconds in took)
            claim = f"{direction}, {label}, {one.num_chunks} chunks of {CHUNK} ({size / 1e6:.0f} MB)"
            tell(claim, prepared, ceiling, goal, PEERS.get((one.name, one.num_chunks), {}).get(direction))
            tell(f"{claim}, checks and tables included", unprepared, ceiling, goal, None)


def _copy(to: torch.Tensor, at: torch.Tensor) -> None:
    to.copy_(at, non_blocking=True)
    torch.cuda.synchronize()


def _see_through(act: Callable[[], Transfer]) -> None:
    act().wait()


def both_ways(one: Case) -> None:
    """Stores and loads at once, against stores alone, and against two flat copies at once."""
    size = one.num_bytes
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def flat() -> None:
        with torch.cuda.stream(streams[0]):
            host[0].copy_(device[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            device[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize()

    others = [torch.empty_like(chunk).pin_memory() for chunk in one.chunks]
    with Mover(one.arena) as mover:
        store = mover.prepare(one.copies[0], one.chunks, Direction.STORE)
        load = mover.prepare(one.copies[1], others, Direction.LOAD)

        def alone() -> None:
            mover.start(store).wait()

        def both() -> None:
            for handle in [mover.start(store), mover.start(load)]:
                handle.wait()

        flat_one = partial(_copy, host[0], device[0])
        flat_one_took, flat_took, one_took, both_took = walls([flat_one, flat, alone, both], 9)
    times = 2 * one_took / both_took
    print(
        json.dumps(
            {
                "claim": f"both ways at once, {one.name}, {one.num_chunks} chunks ({size / 1e6:.0f} MB each way)",
                "ours": round(2 * size / both_took / 1e9, 1),
                "unit": "GB/s",
                "one_way": round(size / one_took / 1e9, 1),
                "ceiling": round(2 * size / flat_took / 1e9, 1),
                "times_one_way": round(times, 2),
                "flat_times_one_way": round(2 * flat_one_took / flat_took, 2),
                "goal": 1.8,
                "met": times >= 1.8,
            }
        )
    )


def check(one: Case, mover: Mover) -> None:
    """What is stored, loaded elsewhere and stored again is the same."""
    for chunk in one.chunks:
        chunk.zero_()
    mover.store(one.copies[0], one.chunks).wait()
    first = [chunk.clone() for chunk in one.chunks]
    mover.load(one.copies[1], one.chunks).wait()
    for chunk in one.chunks:
        chunk.zero_()
    mover.store(one.copies[1], one.chunks).wait()
    for before, after in zip(first, one.chunks, strict=True):
        assert torch.equal(before, after), f"{one.name}: bytes changed on the way"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a model of: " + ", ".join(models()))
    chosen = parser.parse_args().only
    if not torch.cuda.is_available():
        sys.exit("bench.transfer needs an NVIDIA GPU")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for name, spec in models().items():
        if chosen and name != chosen:
            continue
        for layout in Layout:
            made = make_plan(spec, "24GiB", layout=layout, block_tokens=BLOCK)
            with Arena(made, "cuda") as arena:
                for pool in made.pools:
                    arena.pool(pool.name).view(torch.int64).random_()
                for num_chunks in (1, 16):
                    one = case(name, made, arena, num_chunks, 8)
                    if layout is Layout.LAYER_MAJOR:
                        kernels(one)
                    moves(one, f"{name}, {layout}")
                    if layout is Layout.LAYER_MAJOR and num_chunks == 16:
                        both_ways(one)


if __name__ == "__main__":
    main()
