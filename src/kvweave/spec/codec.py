"""Frozen dataclasses to JSON objects and back, with errors that say where and what.

Fields at their default are left out, so that JSON stays readable and new fields do not break old files.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvweave.errors import KVWeaveError, SpecError, UnknownName
from kvweave.spec.reach import Reach, reach_class

T = TypeVar("T")


def to_dict(value: Any) -> dict[str, Any]:
    """The JSON object of a dataclass instance."""
    data: dict[str, Any] = {"kind": value.kind} if _is_reach(type(value)) else {}  # type: ignore[arg-type]
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if item != field.default:
            data[field.name] = _plain(item)
    return data


@cache
def _is_reach(cls: type[object]) -> bool:
    """As `isinstance(value, Reach)`, but asked once a class: a protocol asks for its members each time."""
    return all(hasattr(cls, name) for name in ("kind", "per_token", "head", "span", "tail"))


def _plain(item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        return to_dict(item)
    if isinstance(item, tuple | list):
        return [_plain(entry) for entry in item]
    if isinstance(item, Mapping):
        return {key: _plain(entry) for key, entry in item.items()}
    return item.value if isinstance(item, Enum) else item


def from_dict(cls: type[T], data: object, where: str) -> T:
    """An instance of `cls`; unknown, missing and mistyped entries are errors that name `where`."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where}: expected an object, got {type(data).__name__}")
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise UnknownName(f"key ({where})", key, fields)
    required = [name for name, field in fields.items() if _is_required(field) and name not in data]
    if required:
        raise SpecError(f"{where}: missing {', '.join(required)}")
    values = {key: _build(hints[key], item, f"{where}.{key}") for key, item in data.items()}
    with _at(where):
        return cls(**values)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Errors from within say where."""
    try:
        yield
    except KVWeaveError as error:
        error.args = (f"{where}: {error}",)
        raise


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _build(hint: Any, item: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return item
    if origin in (types.UnionType,) or str(origin) == "typing.Union":
        return None if item is None else _build(next(a for a in args if a is not type(None)), item, where)
    if origin is tuple:
        if not isinstance(item, list | tuple):
            raise SpecError(f"{where}: expected a list, got {type(item).__name__}")
        hints = args[:1] * len(item) if args[1:] == (...,) else args
        if len(hints) != len(item):
            raise SpecError(f"{where}: expected {len(hints)} entries, got {len(item)}")
        return tuple(_build(h, entry, f"{where}[{i}]") for i, (h, entry) in enumerate(zip(hints, item, strict=True)))
    if origin is not None and issubclass(origin, Mapping):
        return {key: _build(args[1], entry, f"{where}[{key!r}]") for key, entry in dict(item).items()}
    if hint is Reach:
        if not isinstance(item, Mapping) or not isinstance(item.get("kind"), str):
            raise SpecError(f"{where}: a reach is an object with a 'kind', got {item!r}")
        with _at(where):
            cls = reach_class(item["kind"])
        return from_dict(cls, {k: v for k, v in item.items() if k != "kind"}, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, item, where)  # type: ignore[arg-type]
    if issubclass(hint, Enum):
        with _at(where):
            return hint.parse(item) if hasattr(hint, "parse") else _member(hint, item)
    if not isinstance(item, hint) or (isinstance(item, bool) and hint is not bool):
        raise SpecError(f"{where}: expected {hint.__name__}, got {item!r}")
    return item


def _member(enum: type[Enum], value: object) -> Enum:
    choices = [member.value for member in enum]
    if value not in choices:
        raise UnknownName(enum.__name__.lower(), value, choices)
    return enum(value)
