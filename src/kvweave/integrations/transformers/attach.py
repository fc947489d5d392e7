"""`attach(model)`: its own `generate`, and every pipeline over it, runs on pages; `detach(model)` is the way back."""

from __future__ import annotations

from typing import Any

from kvweave.errors import BadCall, BadTokens
from kvweave.integrations.transformers.weave import KVWeave


class PagedGenerate:
    """Takes the place of `model.generate`. What pages cannot serve, transformers does, as if nobody had attached.

    In a copy of the model, or in one that was saved and loaded, it is the model's own `generate` again.
    """

    def __init__(self, weave: KVWeave, model: Any) -> None:
        self.weave, self._model = weave, model
        self.own = model.generate

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        try:
            call = None if self.weave.is_closed else self.weave.read_call(*inputs, **options)
        except BadTokens:
            call = None
        if call is None:
            options.pop("namespace", None)
            return self.own(*inputs, **options)
        return self.weave.answer(call)

    def __reduce__(self) -> Any:
        return getattr, (self._model, "generate")


def attach(model: Any, memory: int | str = "2GiB", **options: Any) -> KVWeave:
    """Let `model.generate` reuse prefixes, with what `KVWeave` takes; returns the KVWeave.

    `detach(model)` is the way back. Meanwhile `model.generate` takes a `namespace=` too.
    """
    holder = _holder(model)
    if "generate" in vars(holder):
        raise BadCall(
            f"{type(model).__name__} has a generate of its own already: detach(model), or take that off, first"
        )
    weave = KVWeave(model, memory, **options)
    holder.generate = PagedGenerate(weave, holder)
    return weave


def detach(model: Any) -> None:
    """Give `model.generate` back to transformers, and the memory to the machine; a model that is not attached stays."""
    holder = _holder(model)
    found = vars(holder).get("generate")
    if isinstance(found, PagedGenerate):
        del holder.generate
        found.weave.close()


def _holder(model: Any) -> Any:
    """Where a model's attributes are: what `torch.compile` gave hands them to the model inside."""
    return getattr(model, "_orig_mod", model)
