"""TOML tables to dataclasses and back: each value is checked against its field's type, and an unknown key is an error."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from minbert.errors import MinbertError, shown, suggest


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MinbertError(f"{shown(path)}: no such recipe") from None
    except (ValueError, OSError) as error:  # ValueError: no TOML, no UTF-8, or a number beyond Python's limit
        raise MinbertError(f"{shown(path)}: not a TOML file ({error})") from None


def from_table(cls: Any, raw: Mapping[str, Any], where: str) -> Any:
    """A dataclass of plain fields from a TOML table, checked as a recipe's tables are."""
    needed = {item.name for item in fields(cls) if item.default is item.default_factory is dataclasses.MISSING}
    if missing := sorted(needed - set(raw)):
        raise MinbertError(f"{where}: no {', '.join(missing)}; expected {'it' if len(missing) == 1 else 'them'}")
    return build(cls, raw, where)


def build(cls: Any, raw: Mapping[str, Any], where: str, **given: Any) -> Any:
    """A dataclass from a table, each value checked against its field's type; an unknown key suggests a near one."""
    hints = get_type_hints(cls)
    known = {item.name for item in fields(cls)} - set(given)
    values = dict(given)
    for key, value in raw.items():
        if key not in known:
            raise MinbertError(f'{where}: unknown key "{key}"{suggest(key, known)}; known: {", ".join(sorted(known))}')
        values[key] = _convert(value, hints[key], f"{where}: {key}")
    needed = [item.name for item in fields(cls) if item.default is item.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in values]:
        raise MinbertError(f"{where}: no {', '.join(missing)}; expected {'it' if len(missing) == 1 else 'them'}")
    return cls(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert(value, next(argument for argument in arguments if argument is not type(None)), where)
    if origin is Literal:
        if value not in arguments:
            near = suggest(value, arguments) if isinstance(value, str) else ""
            raise MinbertError(f'{where} is "{value}"{near}; expected one of: {", ".join(map(str, arguments))}')
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if arguments[-1] is not Ellipsis and len(items) != len(arguments):
            raise MinbertError(f"{where} has {len(items)} values; expected {len(arguments)}")
        return tuple(_convert(item, arguments[0], where) for item in items)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise MinbertError(f"{where} is {value!r}; expected a table")
        return {str(key): _convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise MinbertError(f"{where} is {value!r}; expected a table")
        return build(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf  # float() of a longer one is an OverflowError
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise MinbertError(f"{where} is {value!r}; expected {_article(hint)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise MinbertError(f"{where} is {value}; expected a finite number")
    return value


def _article(hint: Any) -> str:
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(hint, str(hint))


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value under its whole key, `optimizer.lr`; of a list of stages, under their names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key == "stages" and isinstance(value, list):  # a task may have that name
            value = {stage["name"]: stage for stage in value}
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def toml_key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else toml_value(name)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # Only this one TOML wants escaped and JSON not; and TOML knows no surrogates, JSON's way to escape an emoji
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)
