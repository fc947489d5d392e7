"""Planning a fleet: which model on how many GPUs, for how many conversations of which length? Needs numpy alone.

Cache memory here is what the GPUs have left after weights and a reserve; both are your figures, nothing is guessed.

Run: python examples/plan_fleet.py
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import kvweave as kw

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on `tp` GPUs of `gpu_gib` each, with `weights_gib` of weights in all."""

    example: str
    weights_gib: float
    tp: int = 8
    gpu_gib: float = 80
    reserve_gib: float = 6  # activations, graphs, the runtime
    dtype: str = "bfloat16"

    def plan(self) -> kw.Plan:
        """How one GPU cuts what is left for its cache."""
        left = self.gpu_gib - self.reserve_gib - self.weights_gib / self.tp
        config = files("kvweave") / "examples" / f"{self.example}.json"
        spec = kw.from_config(str(config), dtype=self.dtype)
        return kw.make_plan(spec, int(left * GIB), parallel=kw.Parallel(tp=self.tp))


FLEET = (
    Deployment("llama-3.1-70b", weights_gib=131),
    Deployment("gemma-3-27b", weights_gib=51, tp=2),
    Deployment("gpt-oss-120b", weights_gib=61, tp=2),
    Deployment("qwen3-next-80b", weights_gib=149, tp=4),
    Deployment("deepseek-v3", weights_gib=640, tp=16, dtype="fp8"),
)
LENGTHS = (4_096, 32_768, 131_072)


def row(deployment: Deployment) -> list[str]:
    plan = deployment.plan()
    share = plan.num_bytes / GIB
    sequences = [f"{plan.sequences(length):,}" for length in LENGTHS]
    return [deployment.example, f"{deployment.tp} x {deployment.gpu_gib:g}", f"{share:.1f}", *sequences]


def main() -> None:
    head = ["model", "GPUs, GiB", "cache a GPU, GiB", *(f"x {length:,} tokens" for length in LENGTHS)]
    rows = [head, *map(row, FLEET)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for line in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
