"""Draft models: their layers join the target's groups, so one table, one pool and one prefix serve both."""

from __future__ import annotations

from dataclasses import replace

from kvweave.errors import AmbiguousDraft, DraftMismatch
from kvweave.spec import LayerCache, ModelSpec
from kvweave.spec.layer_spec import difference

CURE = " give the draft its own groups"
SOLE = "default"
"""The tag of a draft that knows no groups; it may stand for the one group of the target that is its equal."""


def merge_draft(target: ModelSpec, draft: ModelSpec, *, own_groups: bool = False) -> ModelSpec:
    """The target with the draft's layers behind its own, as draft layers of the same groups.

    Tags are matched exactly. A draft with the sole tag "default" is matched with the one full-attention group that
    equals it. `own_groups` gives the draft groups of its own, tagged "draft.<tag>", where layouts differ. Merge
    further modules one after the other; `restrict` shows the draft its layers in the target's groups.
    """
    groups = {tag: cache for tag, (cache, _) in target.groups().items()}
    if own_groups:
        merged = draft.retag({tag: f"draft.{tag}" for tag in draft.groups()})
    else:
        merged = draft.retag({tag: _match(cache, draft, groups) for tag, (cache, _) in draft.groups().items()})
    offset = len(target.layers)
    layers = tuple(
        replace(layer, draft=True, reads=tuple(replace(read, layer=read.layer + offset) for read in layer.reads))
        for layer in merged.layers
    )
    notes = tuple(dict.fromkeys((*target.notes, *(f"draft: {note}" for note in draft.notes))))
    return replace(target, layers=target.layers + layers, notes=notes)


def _match(cache: LayerCache, draft: ModelSpec, groups: dict[str, LayerCache]) -> str:
    """The target's tag for a cache of the draft."""
    if cache.tag in groups:
        if cache != groups[cache.tag]:
            raise DraftMismatch(
                f"the draft's group {cache.tag!r} and the target's differ in"
                f" {difference(groups[cache.tag], cache)};{CURE}"
            )
        return cache.tag
    listed = ", ".join(groups)
    if cache.tag != SOLE or len(draft.groups()) > 1 or cache.reach.span is not None:
        raise DraftMismatch(f"the draft's group {cache.tag!r} is not among the target's ({listed});{CURE}")
    equal = [tag for tag, other in groups.items() if replace(cache, tag=tag) == other]
    if len(equal) > 1:
        raise AmbiguousDraft(f"the draft's sole group equals several of the target's: {', '.join(equal)}; name one")
    if not equal:
        raise DraftMismatch(f"the draft's sole group equals none of the target's ({listed});{CURE}")
    return equal[0]
