"""Files: a CONFIG, which is a path or the name of a bundled example; and what is written."""

from __future__ import annotations

import difflib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvweave.errors import ConfigError
from kvweave.spec import DType
from kvweave.spec.hf.fields import language_model, load


def example_names() -> list[str]:
    """The bundled configs, by name."""
    return sorted(entry.name.removesuffix(".json") for entry in _folder().iterdir() if entry.name.endswith(".json"))


def read_config(source: str) -> dict[str, Any]:
    """The config.json at a path or in a directory; where nothing is there, the bundled example of that name."""
    name = source.removeprefix("examples/").removesuffix(".json")
    if Path(source).exists():
        return load(source)
    if name in example_names():
        return json.loads((_folder() / f"{name}.json").read_text())  # type: ignore[no-any-return]
    close = difflib.get_close_matches(name, example_names(), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "`kvweave examples` lists those that come with kvweave"
    raise ConfigError(f"no config at {source!r}, and no example of that name; {hint}")


def model_dtype(config: dict[str, Any]) -> str:
    """The dtype that a config says its model runs in; bfloat16 where it says nothing, as the reader assumes."""
    model = language_model(config)
    return str(DType.parse(model.get("dtype") or model.get("torch_dtype") or DType.BFLOAT16))


def written(path: Path, text: str) -> Path:
    """Write a file, and its folder where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _folder() -> Any:
    return files("kvweave") / "examples"
