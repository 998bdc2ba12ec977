"""Configs from and to plain dicts, and so YAML and `key=value`.

`from_dict` is the only door in. It names the key that is wrong and the nearest key
that exists; it never ignores one.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, get_type_hints

import pydantic

from jppo.config import Config, ConfigError


def keys(cls: type = Config, prefix: str = "") -> dict[str, tuple[Any, Any, str]]:
    """Every dotted key with (type, default, one line of help)."""
    found: dict[str, tuple[Any, Any, str]] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            found |= keys(kind, name + ".")  # type: ignore[arg-type]
        else:
            found[name] = (kind, field.default, field.metadata.get("doc", ""))
    return found


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"eps": .1}} → {"ppo.eps": .1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _nearest(key: str, known: dict[str, Any]) -> str:
    """The known key that looks most like this one, or ends like it."""

    def likeness(other: str) -> float:
        tail = difflib.SequenceMatcher(None, key.split(".")[-1], other.split(".")[-1])
        return difflib.SequenceMatcher(None, key, other).ratio() + tail.ratio()

    return max(known, key=likeness)


def from_dict(tree: dict[str, Any], base: Any = None) -> Any:
    """A Config from a nested (or dotted) dict, over `base` or the defaults.

    The result is of the type of `base`: any dataclass of settings serves.

    Raises ConfigError: an unknown key with the nearest known one, a value of the
    wrong type with what was expected.
    """
    known = keys(type(base or Config()))
    merged = flatten(to_dict(base or Config()))
    for key, value in flatten(tree).items():
        if key not in known:
            raise ConfigError(
                f"unknown config key {key!r}; did you mean {_nearest(key, known)!r}?"
            )
        merged[key] = value
    nested: dict[str, Any] = {}
    for key, value in merged.items():
        kind = known[key][0]
        if isinstance(value, bool) and kind is not bool:  # YAML's on, off, yes, no
            raise ConfigError(f"config key {key!r} is {value!r}: it is not a switch")
        try:
            # lax only for numbers written as text ("1e-5" is a string to YAML)
            value = pydantic.TypeAdapter(kind).validate_python(value)
        except pydantic.ValidationError as error:
            says = error.errors()[0]["msg"]
            raise ConfigError(f"config key {key!r} is {value!r}: {says}") from None
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return _build(type(base or Config()), nested)


def _build(cls: type, tree: dict[str, Any]) -> Any:
    """A dataclass of dataclasses from checked values."""
    hints = get_type_hints(cls)
    nested = {k: _build(hints[k], v) for k, v in tree.items() if isinstance(v, dict)}
    return cls(**tree | nested)


def to_dict(cfg: Any) -> dict[str, Any]:
    """Nested plain dict (tuples as lists), ready for YAML."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(cfg))
