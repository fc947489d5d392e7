"""Rotary embeddings whose frequencies depend on the length of the prompts in a call: longrope, dynamic NTK.

transformers takes the largest position of a forward, over all rows, and rotates every key of that forward accordingly.
So the KV of a token depends on the longest prompt in the batch, and there are two rules:

    range      prompts share prefixes only if their calls have the same frequencies: `range_of` is part of the namespace
    length     a piece of a prompt, or one row of a batch, is computed with the frequencies of the whole call
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Range = tuple[int, ...]
"""Calls with equal ranges have equal frequencies; () if they never change."""


class LengthRope:
    """The rotary embeddings of one model that depend on the length; most models have none."""

    def __init__(self, model: Any) -> None:
        self._modules = [module for module in model.modules() if is_changing(module)]
        self._rules = sorted({rule for module in self._modules for rule in _rules(module)})
        self.forced_length: int | None = None
        """The length that every forward is computed for now, whatever its positions."""

    @property
    def is_there(self) -> bool:
        """Whether the model has such embeddings."""
        return bool(self._rules)

    def range_of(self, length: int) -> Range:
        """The range of a call whose longest row has `length` tokens."""
        return tuple(
            0 if length <= border else length if kind == "dynamic" else border + 1 for kind, border in self._rules
        )

    def restart(self) -> None:
        """Reset the longest length seen: dynamic frequencies, once extended, would stay so."""
        for module in self._modules:
            for name, kind in _kinds(module).items():
                if kind == "dynamic":
                    prefix = f"{name}_" if name else ""
                    original = getattr(module, f"{prefix}original_inv_freq")
                    module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
                    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    @contextmanager
    def with_length(self, length: int) -> Iterator[None]:
        """Within this context, forwards use the frequencies of a call of `length` tokens.

        Hooks append one more position, the last one of such a call, to the input of the embedding, and remove its
        output; but not in other threads, which may call the model meanwhile.
        """
        mine = threading.get_ident()

        def one_more(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _one_more(length, args, kwargs) if threading.get_ident() == mine else None

        def one_less(_: Any, __: Any, output: Any) -> Any:
            return _one_less(output) if threading.get_ident() == mine else None

        handles = [
            handle
            for module in self._modules
            for handle in (
                module.register_forward_pre_hook(one_more, with_kwargs=True),
                module.register_forward_hook(one_less),
            )
        ]
        self.forced_length = length
        try:
            yield
        finally:
            self.forced_length = None
            for handle in handles:
                handle.remove()


def is_changing(module: Any) -> bool:
    """Whether its frequencies depend on the length of a call: forwards replace its buffers."""
    return any(kind in ("dynamic", "longrope") for kind in _kinds(module).values())


def _kinds(module: Any) -> dict[str, str]:
    """The rope types of a module, by the type of layer they are for ('' for all layers)."""
    given = getattr(module, "rope_type", None)
    named = given.items() if isinstance(given, dict) else [("", given)]
    return {name: "dynamic" if "dynamic" in str(kind) else str(kind) for name, kind in named if kind}


def _rules(module: Any) -> Iterator[tuple[str, int]]:
    """(rope type, the longest length with the original frequencies)."""
    for name, kind in _kinds(module).items():
        if kind == "dynamic":
            yield kind, int(module.original_max_seq_len)
        elif kind == "longrope":
            parameters = module.config.rope_parameters
            parameters = parameters[name] if name else parameters
            yield kind, int(parameters["original_max_position_embeddings"])


def _one_more(length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = torch.full_like(positions[..., :1], length - 1)
    positions = torch.cat([positions, last], dim=-1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


def _one_less(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(map(_one_less, output))
    return output[..., :-1, :]
