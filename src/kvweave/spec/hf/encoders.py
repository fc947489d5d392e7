"""Models that keep no past of tokens, or more than that: encoders, and decoders that also attend to an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvweave.errors import ConfigError

# fmt: off
ENCODERS = frozenset((
    "albert", "bert", "big_bird", "camembert", "canine", "convbert", "data2vec-text", "deberta", "deberta-v2",
    "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert",
    "jina_embeddings_v3", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "longformer", "luke", "markuplm",
    "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert", "nystromformer", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "splinter", "squeezebert", "tapas", "ultrabert",
    "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
))
# fmt: on
"""Families in which every token sees those after it, unless `is_decoder` says otherwise."""


def refuse_encoders(config: Mapping[str, Any], family: str) -> None:
    """Raise `ConfigError` for a model that cannot be described by what its layers keep of earlier tokens."""
    if _attends_to_an_encoder(config):
        raise ConfigError(
            f"{family} is an encoder-decoder: its layers also keep keys and values of the encoder's output"
            " (cross-attention), which are not described here, so a plan would leave them out"
        )
    if family in ENCODERS and not config.get("is_decoder"):
        raise ConfigError(
            f"{family} is an encoder: each token sees those after it, so nothing is kept from one step to the next and"
            " there is no KV cache to plan (a decoder of this family says is_decoder: true)"
        )


def _attends_to_an_encoder(config: Mapping[str, Any]) -> bool:
    said = config.get("is_encoder_decoder")
    if said is not None:
        return bool(said)
    return bool(config.get("encoder_layers") and config.get("decoder_layers"))
