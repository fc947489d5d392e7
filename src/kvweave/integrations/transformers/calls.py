"""Calls of `generate`: their prompts, and whether pages can serve them.

prompts    token ids, and a mask with padding on the left
fallback   calls that pages cannot serve: transformers' own cache serves them, and nothing is cached
BadTokens  prompts that are not token ids: embeddings, or positions of the user's own
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.errors import BadTokens
from kvweave.integrations.transformers.build_layers import takes_no_padding
from kvweave.integrations.transformers.images import IMAGE_TYPES, PIXELS, TYPES, Images, read_images
from kvweave.integrations.transformers.prompts import Prompts
from kvweave.integrations.transformers.rope import LengthRope
from kvweave.integrations.transformers.support import CACHE_NAMES, Served

DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
SEVERAL = ("num_beams", "num_return_sequences")
WHOLE_PROMPT = ("output_hidden_states", "output_attentions", "use_mtp", "speculation_type")
"""Options that need the hidden states, or the attention, of every token of a prompt: some drafters read them."""
OTHER_CACHES = ("quantized", "paged")
"""Values of `cache_implementation` that change the answer, or the generation loop. Others only say where rows are
stored."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateCall:
    """One call. `options` are for `model.generate`, beside the prompts and the cache.

    If `fallback` gives a reason, transformers' own cache serves the call.
    """

    prompts: Prompts | None
    options: dict[str, Any]
    namespace: Hashable = ""
    extras: tuple[str, ...] = ()
    images: Images | None = None
    prefill_tokens: int | None = None
    is_one_loop: bool = False
    """Whether its first forward is over the prompts' own rows and tokens: no beams, no drafts."""
    fallback: str = ""


class CallReader:
    """Reads the calls of one model."""

    def __init__(self, model: Any, served: Served, rope: LengthRope) -> None:
        self._model, self._rope = model, rope
        self._takes_no_padding = takes_no_padding(served)
        self._has_states = served.has_states
        self._positional = [name for name in inspect.signature(type(model).generate).parameters if name != "self"]
        self._named = set(self._positional)
        self._forward = set(inspect.signature(model.forward).parameters)

    def read(self, inputs: tuple[Any, ...], options: dict[str, Any], namespace: Hashable = "") -> GenerateCall:
        """Read a call; raises `BadTokens` if its prompts are not token ids."""
        options = {**dict(zip(self._positional, inputs, strict=False)), **options}
        mask = options.pop("attention_mask", None)
        fallback = self._fallback(options)
        ids = options.pop("inputs", None)
        ids = options.pop("input_ids", None) if ids is None else ids
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise BadTokens(f"generate takes input_ids [batch, tokens], one row a prompt; got {_shown(ids)}")
        if fallback:
            given = {"inputs": ids, **options}
            return GenerateCall(None, given if mask is None else {**given, "attention_mask": mask}, fallback=fallback)
        pad = self._pad_token(options)
        if mask is None and _has_holes(ids, pad):
            reason = f"the padding token {pad} is in the midst of a prompt, and no attention_mask was given"
            return GenerateCall(None, {"inputs": ids, **options}, fallback=reason)
        prompts = self.prompts(ids, mask, pad)
        whole = {"inputs": ids, "attention_mask": prompts.mask, **options}
        extras = self._take_default(prompts, options)
        others = self._take_inputs(options)
        images = read_images(self._model.config, ids, prompts.mask, others) if others else None
        if isinstance(images, str):
            return GenerateCall(None, whole, fallback=images)
        prefill = self._setting(options, "prefill_chunk_size")
        is_one_loop = not any(self._setting(options, name) for name in DRAFTS) and all(
            (self._setting(options, name) or 1) == 1 for name in SEVERAL
        )
        return GenerateCall(prompts, self._for_pages(options), namespace, extras, images, prefill, is_one_loop)

    def prompts(self, ids: torch.Tensor, mask: torch.Tensor | None, pad: int | None = None) -> Prompts:
        """The prompts of a batch; without a mask and without a padding token there is no padding."""
        prompts = Prompts.read(ids, mask, pad)
        if any(prompts.pads) and self._takes_no_padding:
            raise BadTokens("this model takes tokens several together, padding among them: prompts of one length only")
        return prompts

    def pad_token(self) -> int | None:
        """The padding token that the model itself declares."""
        return self._pad_token({})

    def _setting(self, options: dict[str, Any], name: str) -> Any:
        """The value in effect: of the option, else of the given generation config, else of the model's."""
        if name in options:
            return options[name]
        configs = (options.get("generation_config"), self._model.generation_config)
        values = (getattr(config, name, None) for config in configs)
        return next((value for value in values if value is not None), None)

    def _fallback(self, options: dict[str, Any]) -> str:
        """Why pages cannot serve a call; '' if they can."""
        config = options.get("generation_config")
        if options.get("use_cache") is False or getattr(config, "use_cache", None) is False:
            return "use_cache=False"
        for name in (*CACHE_NAMES, "custom_generate", "adapter_names"):
            if options.get(name) is not None:
                return f"{name}= was given"
        for name in (*WHOLE_PROMPT, "token_healing", "is_assistant"):
            if self._setting(options, name):
                return f"{name}={self._setting(options, name)}"
        if (cache := self._setting(options, "cache_implementation")) in OTHER_CACHES:
            return f"cache_implementation={cache}"
        if drafts := [name for name in DRAFTS if self._setting(options, name)]:
            if self._has_states:
                return f"{drafts[0]}: drafts are taken back, and the states of this model cannot be"
            if self._rope.is_there:
                return f"{drafts[0]}: the rotary frequencies of this model depend on how many drafts there are"
        return ""

    def _pad_token(self, options: dict[str, Any]) -> int | None:
        """The padding token of prompts; None if it also ends answers, and so cannot be told from their last token."""
        pad, end = (self._setting(options, name) for name in ("pad_token_id", "eos_token_id"))
        ends = end.tolist() if isinstance(end, torch.Tensor) else end
        return None if pad in (ends if isinstance(ends, list) else [ends]) else pad

    def _take_default(self, prompts: Prompts, options: dict[str, Any]) -> tuple[str, ...]:
        """Remove inputs that have their default values; returns the names of those that are zeros and change the result
        all the same.

        Some models (GPT-2) add an embedding for zeros of `token_type_ids`: these are passed to every forward, and such
        prompts share prefixes only among themselves. Zeros of `mm_token_type_ids` mean that there is no image; beside
        an image, zeros are an input like any other.
        """
        if (positions := options.pop("position_ids", None)) is not None and not _are_default(positions, prompts):
            raise BadTokens(
                "generate takes no position_ids but those that transformers counts by itself (0, 1, 2, ... from the"
                " first token after padding): a prefix is found by its tokens"
            )
        if options.get(PIXELS) is not None:
            return ()
        if _are_zeros(options.get(IMAGE_TYPES), prompts):
            del options[IMAGE_TYPES]
        return (TYPES,) if _are_zeros(options.get(TYPES), prompts) else ()

    def _take_inputs(self, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Remove the model's other inputs from the options; raises `BadTokens` for tensors that its forward does not
        take."""
        config = self._model.generation_config
        tensors = {n: v for n, v in options.items() if isinstance(v, torch.Tensor) and n not in self._named}
        is_input = {TYPES: options.get(PIXELS) is not None or (TYPES in tensors and bool(tensors[TYPES].any()))}
        inputs = {n: v for n, v in tensors.items() if not hasattr(config, n) and is_input.get(n, True)}
        if others := [name for name in inputs if name not in self._forward]:
            raise BadTokens(
                "generate takes input_ids, attention_mask and what else the model has a name for: tokens are what a"
                f" prefix is found by; got {', '.join(others)}"
            )
        for name in inputs:
            del options[name]
        return inputs

    def _for_pages(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options for a call with our cache, whose prompts are computed before `generate` is called."""
        changed: dict[str, Any] = {"use_cache": True, "cache_implementation": None, "prefill_chunk_size": None}
        own = self._model.generation_config
        if options.get("generation_config") is None:
            unset = {n for n in changed if n not in options and getattr(own, n, None) is None and n != "use_cache"}
            return {**options, **{name: value for name, value in changed.items() if name not in unset}}
        config = copy.deepcopy(options["generation_config"])
        for name, value in changed.items():
            setattr(config, name, value)
        named = {n: v for n, v in changed.items() if n in options or (v is None and getattr(own, n, None) is not None)}
        return {**options, **named, "generation_config": config}


def _has_holes(ids: torch.Tensor, pad: int | None) -> bool:
    if pad is None or not bool((ids == pad).any()):
        return False
    tokens = ids.ne(pad).long()
    return bool((tokens[:, 1:] < tokens[:, :-1]).any()) or not bool(tokens[:, -1].all())


def _are_default(positions: object, prompts: Prompts) -> bool:
    """Whether these are the default positions of the tokens, on every axis; those of padding do not matter."""
    if not isinstance(positions, torch.Tensor) or positions.shape[-1] != prompts.width:
        return False
    natural, mask = prompts.positions.to(positions.device), prompts.mask.to(positions.device)
    try:
        return bool(((positions == natural) | (mask == 0)).all())
    except RuntimeError:  # another number of rows
        return False


def _are_zeros(value: object, prompts: Prompts) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == prompts.ids.shape and not bool(value.any())


def _shown(ids: object) -> str:
    return f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
