"""Images in prompts: the model's inputs for them, and the digest by which they are found.

Images are compared by content: prompts with different images diverge where the first of these starts. Up to the end of
its last image a prompt is computed in one forward, as transformers does (tokens of an image may attend to one another);
a hit must end after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationMixin

from kvweave.prefix import Span

PIXELS = "pixel_values"
TYPES, IMAGE_TYPES = "token_type_ids", "mm_token_type_ids"
"""Inputs that say which tokens belong to an image; zeros for text."""
INPUTS = (PIXELS, "image_grid_thw", TYPES, IMAGE_TYPES)
MODELS = ("gemma3", "llava", "qwen3_vl")
"""Model types whose images are served from pages: those that tests compare with transformers."""


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one prompt, under the tokens of columns [first, end)."""

    inputs: Mapping[str, torch.Tensor] = field(repr=False)
    first: int
    end: int
    digest: bytes

    @property
    def span(self) -> Span:
        return Span(self.first, self.digest)

    def until(self, end: int) -> dict[str, torch.Tensor]:
        """The inputs of a forward over the tokens before `end`."""
        return {name: each[:, :end] if name in (TYPES, IMAGE_TYPES) else each for name, each in self.inputs.items()}


def read_images(config: Any, ids: torch.Tensor, mask: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Images | str:
    """The images of a call; or the reason why transformers must serve them."""
    others = [name for name in inputs if name not in INPUTS]
    if others or PIXELS not in inputs or config.model_type not in MODELS:
        return f"{', '.join(others or inputs)}= was given"
    if len(ids) > 1 or not bool(mask.all()):
        return "images of several prompts at once, or beside padding"
    is_image = ids == config.image_token_id
    if strange := [
        n for n in (TYPES, IMAGE_TYPES) if n in inputs and not torch.equal(inputs[n], is_image.to(inputs[n]))
    ]:
        return f"{strange[0]}= marks other tokens than those of the images"
    (columns,) = is_image[0].nonzero(as_tuple=True)
    if not len(columns) or int(columns[-1]) + 1 >= ids.shape[1]:
        return "the prompt ends with an image, or has no token for one"
    return Images(inputs, int(columns[0]), int(columns[-1]) + 1, _digest(inputs))


def _digest(inputs: Mapping[str, torch.Tensor]) -> bytes:
    """Of the images, and of which inputs were given: without types a model may see images as text."""
    running = hashlib.sha256(repr(sorted(inputs)).encode())
    for name in (PIXELS, "image_grid_thw"):
        if name in inputs:
            tensor = inputs[name].detach().cpu().contiguous()
            running.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            running.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return running.digest()


def own_positions(model: Any, ids: torch.Tensor, mask: torch.Tensor, images: Images | None) -> torch.Tensor | None:
    """The positions `[..., rows, width]` of a model that computes them itself; None where they are 0, 1, 2, ...

    Such models remember by how much the images of the last prompt shifted positions, and apply it when they are given a
    cache: asking for the positions of this prompt resets that.
    """
    name = "_prepare_position_ids_for_generation"
    own = getattr(type(model), name, None)
    if own is None or own is getattr(GenerationMixin, name, None):
        return None
    inputs = {"attention_mask": mask, **(images.inputs if images else {})}
    positions: torch.Tensor = getattr(model, name)(ids, inputs)
    return positions
