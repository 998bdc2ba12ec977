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


def from_dict(tree: dict[str, Any], base: Config | None = None) -> Config:
    """A Config from a nested (or dotted) dict, over `base` or the defaults.

    Raises ConfigError: an unknown key with the nearest known one, a value of the
    wrong type with what was expected.
    """
    known = keys()
    merged = flatten(to_dict(base or Config()))
    for key, value in flatten(tree).items():
        if key not in known:
            raise ConfigError(
                f"unknown config key {key!r}; did you mean {_nearest(key, known)!r}?"
            )
        merged[key] = value
    sections: dict[str, dict[str, Any]] = {}
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
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    hints = get_type_hints(Config)
    return Config(**{name: hints[name](**parts) for name, parts in sections.items()})


def to_dict(cfg: Any) -> dict[str, Any]:
    """Nested plain dict (tuples as lists), ready for YAML."""
    tree = dataclasses.asdict(cfg)
    return {
        name: {k: list(v) if isinstance(v, tuple) else v for k, v in part.items()}
        if isinstance(part, dict)
        else part
        for name, part in tree.items()
    }
