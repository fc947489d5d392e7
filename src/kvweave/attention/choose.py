"""Which kernels carry out a layer's attention."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvweave.attention.base import Attention
from kvweave.attention.options import AttentionOptions
from kvweave.errors import MissingExtra, NoKernel, UnknownName
from kvweave.tensor import LayerView

BACKENDS = {
    "cpu": "kvweave.attention.cpu:CPUAttention",
    "triton": "kvweave.attention.triton_attention:TritonAttention",
    "flashinfer": "kvweave.attention.flashinfer_attention:FlashInferAttention",
    "reference": "kvweave.attention.reference:ReferenceAttention",
}
AUTO = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
"""What `auto` tries in turn, by the device of the pages. Not FlashInfer: it waits for the device in each step."""


def open_attention(view: LayerView, options: AttentionOptions | None = None, backend: str = "auto") -> Attention:
    """Attention of one layer. `auto` takes the fastest backend that can serve it, by what was measured; a backend asked
    for by name that cannot raises `NoKernel` with the reason."""
    options = options or AttentionOptions()
    if backend != "auto":
        return _class_of(backend)(view, options)
    device = next(iter(view.roles.values())).tensor.device.type
    for name in AUTO.get(device, ("reference",)):
        try:
            return _class_of(name)(view, options)
        except (NoKernel, MissingExtra):
            if name == "reference":
                raise
    raise AssertionError("the reference serves, or says why not")


def _class_of(name: str) -> Callable[[LayerView, AttentionOptions], Attention]:
    if name not in BACKENDS:
        raise UnknownName("attention backend", name, ["auto", *BACKENDS])
    module, _, attribute = BACKENDS[name].partition(":")
    found: Callable[[LayerView, AttentionOptions], Attention] = getattr(import_module(module), attribute)
    return found
