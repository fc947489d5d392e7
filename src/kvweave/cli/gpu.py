"""`--gpu SIZE`: what a GPU has left for the cache once weights, activations and a reserve are off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import ConfigError, PlanError
from kvweave.plan import Parallel
from kvweave.spec import DType
from kvweave.spec.hf.fields import Fields, language_model
from kvweave.spec.hf.parameters import count_parameters
from kvweave.units import format_bytes, parse_bytes

STEP_TOKENS = 8_192
"""Tokens of a step for which activations are estimated, as engines schedule them by default."""
RESERVE_SHARE = 0.1
"""Left alone unless --reserve says otherwise, as engines that use 90% of a GPU leave it: driver, graphs, fragments."""
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
_METHOD_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4.25, "gptq": 4, "awq": 4}
"""Bits a weight of quantisation methods that do not say them; mxfp4 has a scale of 8 bits for 32 weights."""


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """A GPU, and the sizes that the user gives: bytes or a dtype of the weights, bytes of the rest."""

    gpu: str
    weights: str | None = None
    activations: str | None = None
    reserve: str | None = None


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Bytes of one GPU; `weights_from` and `activations_from` say where those numbers come from."""

    gpu: int
    weights: int
    weights_from: str
    activations: int
    activations_from: str
    reserve: int
    reserve_from: str

    @property
    def cache(self) -> int:
        return self.gpu - self.weights - self.activations - self.reserve


def gpu_budget(request: GpuRequest, source: str, config: dict[str, Any], parallel: Parallel) -> GpuBudget:
    """Raises `PlanError` where nothing is left for a cache, with the ranks that would do."""
    gpu = parse_bytes(request.gpu, what="--gpu")
    whole, weights_from = _weights(request.weights, source, config)
    activations, activations_from = _activations(request.activations, config, parallel)
    reserve, reserve_from = int(gpu * RESERVE_SHARE), f"{RESERVE_SHARE:.0%}: driver, graphs, fragments"
    if request.reserve is not None:
        reserve, reserve_from = parse_bytes(request.reserve, what="--reserve", least=0), "as given"
    ranks = parallel.tp * parallel.pp
    shared = f", 1/{ranks} on this rank" if ranks > 1 else ""
    left = GpuBudget(
        gpu, -(-whole // ranks), weights_from + shared, activations, activations_from, reserve, reserve_from
    )
    if left.cache <= 0:
        raise PlanError(_refusal(left, whole))
    return left


def _refusal(left: GpuBudget, whole: int) -> str:
    sizes = f"weights {format_bytes(left.weights)} ({left.weights_from}), activations {format_bytes(left.activations)}"
    enough = (n for n in (2**power for power in range(1, 11)) if left.gpu - whole / n > left.activations + left.reserve)
    ranks = next(enough, None)
    fewer = "weights of fewer bits (--weights fp8)"
    cure = f"--tp {ranks} would do, and perhaps {fewer}" if ranks else f"take a larger one, or {fewer}"
    return f"{sizes} and a reserve of {format_bytes(left.reserve)} leave nothing of {format_bytes(left.gpu)}: {cure}"


# ---- weights


def _weights(said: str | None, source: str, config: dict[str, Any]) -> tuple[int, str]:
    """Bytes of all weights: as given, as they are on disk, or counted in a dtype."""
    if said is not None and said not in BITS:
        return parse_bytes(said, what="--weights"), "as given"
    if said is None and (on_disk := _on_disk(Path(source))):
        return on_disk, f"safetensors in {source}"
    name, bits = (said, BITS[said]) if said else _bits(config)
    try:
        parameters = count_parameters(config)
    except ConfigError as error:
        raise ConfigError(f"{error}: say how large the weights are, for example --weights 16GiB") from error
    return int(parameters * bits / 8), f"about {parameters / 1e9:.2f}B parameters by the config, in {name}"


def _on_disk(source: Path) -> int:
    """What the index of a checkpoint says, else the sizes of its files; 0 where there are none."""
    folder = source if source.is_dir() else source.parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} has no metadata.total_size ({error!r}): give --weights") from error
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if source.exists() else 0


def _bits(config: Mapping[str, Any]) -> tuple[str, float]:
    """The name and the bits of the dtype that a checkpoint's weights are in."""
    quantised = config.get("quantization_config") or language_model(config).get("quantization_config")
    if not quantised:
        model = language_model(config)
        dtype = DType.parse(model.get("dtype") or model.get("torch_dtype") or DType.BFLOAT16)
        return str(dtype), dtype.bits
    method = str(quantised.get("quant_method"))
    bits = quantised.get("bits") or _METHOD_BITS.get(method)
    if not bits:
        raise ConfigError(f"quantisation {method!r} does not say its bits: give --weights, as a size or a dtype")
    return method, float(bits)


# ---- activations


def _activations(said: str | None, config: Mapping[str, Any], parallel: Parallel) -> tuple[int, str]:
    """Of a step: some four rows of the hidden width and three of the MLP's, a token; the latter are divided by tp."""
    if said is not None:
        return parse_bytes(said, what="--activations", least=0), "as given"
    model = Fields(language_model(config), notes=[])
    hidden = model.count("hidden_size")
    inner = model.config.get("intermediate_size") or 4 * hidden
    width = 4 * hidden + 3 * (max(inner) if isinstance(inner, list) else int(inner)) / parallel.tp
    return round(STEP_TOKENS * width * 2), f"estimated for a step of {STEP_TOKENS:,} tokens"
