"""Write src/kvweave/spec/hf/defaults.json: what transformers' config classes assume for the fields our reader asks.

A config.json may leave out whatever equals its class's default (Gemma 3's hub configs leave out the head counts).
Planning needs no transformers, so those numbers travel with us. Run this with a new transformers; a test compares.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HF = Path(__file__).parents[1] / "src" / "kvweave" / "spec" / "hf"
SKIPPED = re.compile(r"vision|audio|speech|video|encoder|image|qformer|vit|codec|wav|decoder_config|talker")


NOT_CACHES = {"encoders.py", "parameters.py"}
"""They ask what a config itself says: whether it is an encoder's, how many weights it has."""


def asked_fields() -> set[str]:
    """Every quoted name in the sources of the reader of caches."""
    text = "".join(path.read_text() for path in sorted(HF.glob("*.py")) if path.name not in NOT_CACHES)
    return set(re.findall(r'"([a-zA-Z0-9_]+)"', text)) - {"model_type", "layer_types", "dtype", "torch_dtype"}


def collect() -> dict[str, dict[str, Any]]:
    """By model_type, the defaults that are plain values."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    asked, result = asked_fields(), {}
    for model_type in sorted(CONFIG_MAPPING):
        if SKIPPED.search(model_type) and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            continue
        cls = CONFIG_MAPPING[model_type]
        values = {name: getattr(cls, name, None) for name in sorted(asked)}
        plain = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or len(plain) > 3:
            result[model_type] = plain
    return result


def main() -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in collect().items()]
    (HF / "defaults.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} model types -> {HF / 'defaults.json'}", file=sys.stderr)


if __name__ == "__main__":
    main()
