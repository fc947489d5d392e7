"""Groups and roles in a few words, as tables and pictures show them."""

from __future__ import annotations

from fractions import Fraction
from itertools import groupby

from kvweave.cli.plan_request import PlanResult
from kvweave.plan import Group, Place, Plan
from kvweave.spec import DType, Reach, Role, codec
from kvweave.spec.layer_spec import holds_state
from kvweave.units import format_bytes

_SHORT_DTYPES = {
    DType.BFLOAT16: "bf16",
    DType.FLOAT16: "fp16",
    DType.FLOAT32: "fp32",
    DType.FLOAT8_E4M3: "fp8",
    DType.FLOAT8_E5M2: "fp8_e5m2",
}


def format_title(answer: PlanResult) -> str:
    """`qwen3_next: 48 layers, bfloat16, tp 2`."""
    plan = answer.plan
    drafts = f" + {count(len(plan.draft_layers), 'draft layer')}" if plan.draft_layers else ""
    ranks = [f"{name} {degree}" for name in ("tp", "cp", "pp") if (degree := getattr(plan.parallel, name)) > 1]
    stage = [f"stage {plan.parallel.pp_rank}"] if plan.parallel.pp > 1 else []
    return f"{plan.model_type}: {', '.join([count(plan.num_layers, 'layer') + drafts, answer.dtype, *ranks, *stage])}"


def format_size(num_bytes: float) -> str:
    """`73.69 MiB`, `384 KiB`: decimals only where there are any."""
    return format_bytes(num_bytes).replace(".00 ", " ")


def exact(number: Fraction) -> int | float:
    """An int where it is whole."""
    return int(number) if number.denominator == 1 else float(number)


def count(number: int, noun: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_row(role: Role) -> str:
    """A row: `2x256 bf16`, `656 B packed`, `1x512 bf16 per 4 tokens`."""
    packed = f"{role.row_bytes} B {'planar' if role.planar else 'packed'}"
    plain = f"{'x'.join(map(str, role.shape))} {_SHORT_DTYPES.get(role.dtype, role.dtype)}"
    per = f" per {role.tokens_per_row} tokens" if role.tokens_per_row > 1 else ""
    return (packed if role.parts else plain) + per


def format_role(group: Group, role: Role) -> str:
    """A role in a kernel block, axes in their order in memory: `key: 2 x 16 rows x 256 bf16, 16 KiB`."""
    rows, dtype = group.num_rows(role), _SHORT_DTYPES.get(role.dtype, role.dtype)
    names = [role.name, *(other.name for other in group.cache.roles if other.alias_of == role.name)]
    axes = [f"{size}" for size in role.shape]
    if group.cache.reach.per_token:
        axes.insert(role.token_axis, count(rows, "row"))
    parts = " + ".join(f"{part.name} {part.num_bytes}" for part in role.parts)
    order = "plane by plane" if role.planar else "row by row"
    what = f"{count(rows, 'row')} x ({parts}) bytes, {order}" if parts else f"{' x '.join(axes)} {dtype}"
    return f"{' = '.join(names)}: {what}, {format_size(role.row_bytes * rows)}"


def format_cost(answer: PlanResult) -> str:
    """What a sequence costs: `73.69 MiB of states, up to 416 MiB of windows, 24,576 bytes a token`."""
    plan, most = answer.plan, answer.spec.max_tokens
    windows = sum(window_bytes(group, most) for group in plan.groups if not holds_state(group.cache))
    states, per_token = plan.state_bytes(), plan.bytes_per_token()
    parts = [f"{format_size(states)} of states"] if states else []
    parts += [f"up to {format_size(windows)} of windows"] if windows else []
    parts += [f"{exact(per_token):,} bytes a token"] if per_token else []
    return ", ".join(parts) or "nothing here"


def window_bytes(group: Group, max_tokens: int | None) -> int:
    """The most that a sequence keeps in a group that forgets: a window's rows, as far as the context goes; a state."""
    span = group.cache.reach.span
    if max_tokens is None or not group.cache.reach.per_token or not span:
        return group.fixed_bytes
    return group.fixed_bytes * min(span, max_tokens) // span


def fits_words(answer: PlanResult) -> str:
    """`97 x 32,768 tokens, 25 x 131,072 tokens, if none shares a prefix`, and where the model ends before that."""
    fits = ", ".join(f"{answer.plan.sequences(length):,} x {length:,} tokens" for length in answer.lengths)
    most = answer.spec.max_tokens
    ends = f" (the model itself ends at {count(most, 'token')})" if most and most < max(answer.lengths) else ""
    return f"{fits}, if none shares a prefix{ends}"


def memory_words(answer: PlanResult) -> list[tuple[str, str]]:
    """Where the bytes go, a name and a sentence a line: a GPU's, if one was named, then the cache's."""
    plan, gpu = answer.plan, answer.gpu
    lines = []
    if gpu is not None:
        lines = [
            ("gpu", format_size(gpu.gpu)),
            ("", f"- {format_size(gpu.weights)} weights ({gpu.weights_from})"),
            ("", f"- {format_size(gpu.activations)} activations ({gpu.activations_from})"),
            ("", f"- {format_size(gpu.reserve)} reserve ({gpu.reserve_from})"),
        ]
    whose = "left for the cache" if gpu else "for the cache alone"
    reserve = f", {format_size(plan.reserve)} of it reserved" if plan.reserve else ""
    host = f"; {format_size(plan.host_bytes)} on the host" if plan.host_bytes else ""
    lines.append(("memory", f"{format_size(plan.memory)} {whose}, {format_size(plan.num_bytes)} used{reserve}{host}"))
    return [*lines, *(("", words) for words in format_pools(plan))]


def format_kept(group: Group) -> str:
    """The roles of a group; neighbours with equal rows are named together: `key, value 2x256 bf16`."""
    own = [role for role in group.cache.roles if role.alias_of is None]
    aliases = {role.alias_of: f" = {role.name}" for role in group.cache.roles if role.alias_of}
    runs = [(rows, [r.name + aliases.get(r.name, "") for r in run]) for rows, run in groupby(own, key=format_row)]
    return "; ".join(f"{', '.join(names)} {rows}" for rows, names in runs)


def format_reach(reach: Reach, max_tokens: int | None = None) -> str:
    """`full`, `window 1,024`, `sink_window sinks 4 tokens 1,024`; and whether the context ends within it."""
    beyond = reach.per_token and reach.span and max_tokens and reach.span >= max_tokens
    return _reach_words(reach) + (" (beyond the context: full)" if beyond else "")


def _reach_words(reach: Reach) -> str:
    numbers = {name: value for name, value in codec.to_dict(reach).items() if name != "kind"}
    if list(numbers) == ["tokens"]:
        return f"{reach.kind} {numbers['tokens']:,}"
    return " ".join([reach.kind, *(f"{name} {value:,}" for name, value in numbers.items())])


def format_blocks(group: Group) -> str:
    """`16`, `64 (kernel 16)`; a state has no tokens."""
    if not group.cache.reach.per_token:
        return "-"
    kernel = f" (kernel {group.kernel_tokens})" if group.kernel_blocks > 1 else ""
    return f"{group.block_tokens}{kernel}"


def format_layers(layers: tuple[int, ...], most: int = 6) -> str:
    """`0, 1, 2, ..., 47`; runs of neighbours as `0 to 31`."""
    if len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    if len(layers) <= most:
        return ", ".join(map(str, layers))
    return f"{', '.join(map(str, layers[: most - 2]))}, ..., {layers[-1]}"


def held_bytes(plan: Plan, num_tokens: int) -> int:
    """Bytes of the whole pages that a sequence holds, padding included."""
    return sum(plan.stride_bytes(group.tag) * group.num_blocks_held(num_tokens) for group in plan.groups)


def pools_kind(plan: Plan) -> str:
    """How the groups came to share memory: what `--pools auto` chose, or mixed where some have their own."""
    if len(plan.pools) == 1:
        return "shared" if len(plan.pools[0].tags) > 1 else "uniform"
    return "mixed" if any(len(pool.tags) > 1 for pool in plan.pools) else "independent"


def format_pools(plan: Plan) -> list[str]:
    """A line a pool: `shared: 1,108 super-pages of 73.88 MiB = 79.94 GiB, page_major`."""
    return [
        f"{pool.name}: {count(pool.num_superpages, 'super-page')} of {format_size(pool.unit_bytes)}"
        f" = {format_size(pool.num_bytes)}, {plan.layout}"
        + ("" if pool.place is Place.DEVICE else f" in {pool.place} memory")
        for pool in plan.pools
    ]
