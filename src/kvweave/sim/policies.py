"""Policies to be simulated: built in, by name, or a user's own: `path/to/file.py:Name`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import cast

from kvweave.errors import ConfigError, UnknownName
from kvweave.policy import POLICIES, Policy

AnyPolicy = str | Policy | type[Policy]
"""A built-in policy's name, a user's function or object, or a class, of which each replay makes an object."""


def load_policy(name: str) -> AnyPolicy:
    """A built-in policy's name as it is; of `file.py:Name` the function, or the class, which can be made without
    arguments. The file is run."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in POLICIES:
            raise UnknownName("policy (built in, or FILE.py:NAME)", name, POLICIES)
        return name
    if not Path(path).is_file():
        raise ConfigError(f"--policy: no file is at {path!r}; write FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(f"kvweave_policy_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--policy: {path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        found = getattr(module, attribute)
        made = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--policy: {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(made) and not hasattr(made, "value"):
        raise ConfigError(
            f"--policy: {name!r} is a {type(made).__name__}: no `value(point)`, and it cannot be called with a point"
        )
    return cast(AnyPolicy, found)


def policy_of_replay(policy: AnyPolicy) -> str | Policy:
    """A policy for one replay: of a class an object of its own, which has learned nothing from other replays."""
    return policy() if isinstance(policy, type) else policy
