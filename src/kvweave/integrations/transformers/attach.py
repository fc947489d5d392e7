"""`attach(model)`: `model.generate`, and every pipeline that calls it, runs on pages; `detach(model)` undoes it."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvweave.errors import BadCall, BadTokens
from kvweave.integrations.transformers.weave import KVWeave


class PagedGenerate:
    """Replaces `model.generate`. Calls that pages cannot serve, and prompts that do not fit into them, are passed on to
    transformers unchanged.

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
        options.pop("namespace", None)
        own = partial(self.own, *inputs, **options)
        return own() if call is None else self.weave.answer(call, own)

    def __reduce__(self) -> Any:
        return getattr, (self._model, "generate")


def attach(model: Any, memory: int | str = "2GiB", **options: Any) -> KVWeave:
    """Make `model.generate` reuse prefixes; takes the options of `KVWeave`, and returns it.

    `detach(model)` undoes it. Until then `model.generate` also takes `namespace=`.
    """
    holder = _holder(model)
    if "generate" in vars(holder):
        raise BadCall(
            f"{type(model).__name__} has a generate of its own already: call detach(model), or remove it, first"
        )
    weave = KVWeave(model, memory, **options)
    holder.generate = PagedGenerate(weave, holder)
    return weave


def detach(model: Any) -> None:
    """Restore `model.generate` and free the memory; does nothing for a model that is not attached."""
    holder = _holder(model)
    found = vars(holder).get("generate")
    if isinstance(found, PagedGenerate):
        del holder.generate
        found.weave.close()


def _holder(model: Any) -> Any:
    """The object that holds a model's attributes: a wrapper of `torch.compile` passes them on to the model inside."""
    return getattr(model, "_orig_mod", model)
