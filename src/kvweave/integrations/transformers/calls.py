"""Calls of `generate`, read: which prompts they have, and whether pages can serve them.

prompts    token ids, and a mask that is padding on the left
aside      what pages have no answer to; transformers' own cache has, so it computes those, and nothing is cached
BadTokens  prompts that are no lists of tokens: images, embeddings, positions of one's own
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.errors import BadTokens
from kvweave.integrations.transformers.build import takes_no_padding
from kvweave.integrations.transformers.images import IMAGE_TYPES, TYPES, Images, read_images
from kvweave.integrations.transformers.prompts import Prompts
from kvweave.integrations.transformers.rope import LengthRope
from kvweave.integrations.transformers.support import CACHE_NAMES, Served

DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
WHOLE_PROMPT = ("output_hidden_states", "output_attentions")
OTHER_CACHES = ("quantized", "paged")
"""Of `cache_implementation`: those that change the answer, or the loop. The others say where the same rows are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateCall:
    """One call. `options` is what `model.generate` gets beside the prompts and a past.

    Where `fallback` gives a reason, pages do not serve it.
    """

    prompts: Prompts | None
    options: dict[str, Any]
    namespace: Hashable = ""
    extras: tuple[str, ...] = ()
    images: Images | None = None
    prefill_tokens: int | None = None
    fallback: str = ""


class CallReader:
    """Reads the calls of one model."""

    def __init__(self, model: Any, served: Served, rope: LengthRope) -> None:
        self._model, self._rope = model, rope
        self._takes_no_padding = takes_no_padding(served)
        self._has_states = any(not cache.reach.per_token for _, cache in served.spec.caches())
        self._positional = [name for name in inspect.signature(type(model).generate).parameters if name != "self"]
        self._named = set(self._positional)
        self._forward = set(inspect.signature(model.forward).parameters)

    def read(self, inputs: tuple[Any, ...], options: dict[str, Any], namespace: Hashable = "") -> GenerateCall:
        """Read a call; `BadTokens` where its prompts are no tokens."""
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
        return GenerateCall(prompts, self._for_pages(options), namespace, extras, images, prefill)

    def prompts(self, ids: torch.Tensor, mask: torch.Tensor | None, pad: int | None = None) -> Prompts:
        """The prompts of a batch; without a mask or a padding token there is no padding."""
        prompts = Prompts.read(ids, mask, pad)
        if any(prompts.pads) and self._takes_no_padding:
            raise BadTokens("this model takes tokens several together, padding among them: prompts of one length only")
        return prompts

    def pad_token(self) -> int | None:
        """The padding token that the model itself declares."""
        return self._pad_token({})

    def _setting(self, options: dict[str, Any], name: str) -> Any:
        """What holds: the option, else that of the config which was given, else the model's."""
        if name in options:
            return options[name]
        configs = (options.get("generation_config"), self._model.generation_config)
        values = (getattr(config, name, None) for config in configs)
        return next((value for value in values if value is not None), None)

    def _fallback(self, options: dict[str, Any]) -> str:
        """Why pages do not serve a call; '' if they do."""
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
        """The padding token of prompts; None where it ends answers too, and so cannot be told from them."""
        pad, end = (self._setting(options, name) for name in ("pad_token_id", "eos_token_id"))
        ends = end.tolist() if isinstance(end, torch.Tensor) else end
        return None if pad in (ends if isinstance(ends, list) else [ends]) else pad

    def _take_default(self, prompts: Prompts, options: dict[str, Any]) -> tuple[str, ...]:
        """Take inputs out of the options that say nothing new; returns those that are zeros and yet count.

        Zeros of `token_type_ids` are added to what some models compute (GPT-2): they are given to every forward, and
        such prompts are kept apart. Zeros of `mm_token_type_ids` say that there is no image.
        """
        if (positions := options.pop("position_ids", None)) is not None and not _are_default(positions, prompts):
            raise BadTokens(
                "generate takes no position_ids but those that transformers counts by itself (0, 1, 2, ... from the"
                " first token after padding): a prefix is found by its tokens"
            )
        if _are_zeros(options.get(IMAGE_TYPES), prompts):
            del options[IMAGE_TYPES]
        return (TYPES,) if _are_zeros(options.get(TYPES), prompts) else ()

    def _take_inputs(self, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Take the other inputs of the model out of the options; `BadTokens` for tensors that it has no name for."""
        config = self._model.generation_config
        tensors = {n: v for n, v in options.items() if isinstance(v, torch.Tensor) and n not in self._named}
        inputs = {n: v for n, v in tensors.items() if not hasattr(config, n) and (n != TYPES or bool(v.any()))}
        if others := [name for name in inputs if name not in self._forward]:
            raise BadTokens(
                "generate takes input_ids, attention_mask and what else the model has a name for: tokens are what a"
                f" prefix is found by; got {', '.join(others)}"
            )
        for name in inputs:
            del options[name]
        return inputs

    def _for_pages(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options beside a past: it is the cache, and prompts are computed before transformers has them."""
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
    """Whether these are the positions of the tokens, on every axis; those of padding are nobody's."""
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
