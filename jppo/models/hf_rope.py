"""Rotary embeddings as `config.json` spells them, old and new.

Before transformers 5: `rope_theta` and `rope_scaling` beside each other. Since:
`rope_parameters` with both, one dict, or one for each type of layer (Gemma 3).
"""

from __future__ import annotations

from typing import Any

from jppo.config import ModelConfig
from jppo.models.families import Family

SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
BASE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_from_json(raw: Any) -> dict[str, Any]:
    """rope_theta, rope_theta_local, rope_dims and rope_scaling of a config."""
    nested = raw.tree.get("rope_parameters")
    old = raw.tree.get("rope_scaling")
    local = raw.get("rope_theta_local")
    if isinstance(nested, dict) and "full_attention" in nested:
        slides = nested.get("sliding_attention") or {}
        _scaling(raw, slides, "rope_parameters.sliding_attention", only=("default",))
        local = slides.get("rope_theta", local)
        nested, where = nested["full_attention"], "rope_parameters.full_attention"
    else:
        if local is not None:  # one table for all layers, or Gemma 3's old spelling
            local = raw.tree.get("rope_local_base_freq", local)
        where = "rope_parameters"
    if not isinstance(nested, dict | None) or not isinstance(old, dict | None):
        bad = nested if not isinstance(nested, dict | None) else old
        raise raw.fail(f"{where} = {bad!r} is not supported")
    scaling = _scaling(raw, nested or old or {}, where if nested else "rope_scaling")
    if old and nested and _scaling(raw, old, "rope_scaling") != scaling:
        raise raw.fail(f"rope_scaling is {old!r} and {where} {nested!r}")
    found, where = (nested, where) if nested else (old, "rope_scaling")
    theta = _theta(raw, found or {}, where)
    head_dim = raw.count(
        "head_dim",
        default=raw.count("hidden_size") // raw.count("num_attention_heads"),
    )
    factor = (found or {}).get("partial_rotary_factor")
    factor = raw.get("partial_rotary_factor") if factor is None else factor
    dims = int(head_dim * (1.0 if factor is None else factor))
    if dims % 2 or dims < 2:
        name = "head_dim" if dims == head_dim else "rotary part of a head"
        raise raw.fail(f"{name} {dims} is odd, rotary pairs need two")
    return {
        "rope_theta": theta,
        "rope_theta_local": None if local is None else float(local),
        "rope_dims": None if dims == head_dim else dims,
        "rope_scaling": scaling,
    }


def _kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type")) or "default"


def _scaling(
    raw: Any, rope: dict[str, Any], where: str, only: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    kind, known = _kind(rope), only or tuple(SCALINGS)
    allowed = known if raw.family.name != "phi3" else ("default",)
    keys = SCALINGS.get(kind, ())
    if kind not in allowed or not rope.keys() <= BASE | set(keys):
        raise raw.fail(
            f"{where} = {rope!r} is not supported, only {', '.join(allowed)}"
        )
    values = []
    for key in keys:
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise raw.fail(f"{where}.{key} = {value!r} is not a positive number")
        values.append(float(value))
    if kind == "llama3" and not values[1] < values[2]:
        raise raw.fail(
            f"{where}: low_freq_factor {values[1]} must be below high_freq_factor"
            f" {values[2]}"
        )
    return (kind, *values) if keys else ()


def _theta(raw: Any, rope: dict[str, Any], where: str) -> float:
    """Its base: a key of its own before transformers 5, in rope_parameters since."""
    key = raw.family.key("rope_theta")
    if rope.get("rope_theta") is None:
        return raw.positive("rope_theta", default=10000.0)
    theta = rope["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise raw.fail(f"{where}.rope_theta = {theta!r} is not a positive number")
    if raw.tree.get(key) is not None and raw.tree[key] != theta:
        raise raw.fail(f"{key} is {raw.tree[key]} and in {where} {theta}")
    return float(theta)


def rope_to_json(cfg: ModelConfig, family: Family) -> dict[str, Any]:
    """Both spellings: transformers 4 reads the first, 5 the second."""
    kind = cfg.rope_scaling[0] if cfg.rope_scaling else "default"
    values = dict(zip(SCALINGS[kind], cfg.rope_scaling[1:], strict=True))
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = int(
            values["original_max_position_embeddings"]
        )
    scaling = {"rope_type": kind, **values}
    rope: dict[str, Any] = {**scaling, "rope_theta": cfg.rope_theta}
    out: dict[str, Any] = {family.key("rope_theta"): cfg.rope_theta}
    if cfg.rope_dims is not None:
        part = cfg.rope_dims / cfg.head_dim
        rope["partial_rotary_factor"] = part
        out[family.key("partial_rotary_factor")] = part
    elif "partial_rotary_factor" in family.keys:  # its default is not 1
        out[family.key("partial_rotary_factor")] = 1.0
        rope["partial_rotary_factor"] = 1.0
    if cfg.rope_theta_local is None:
        return out | {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": cfg.rope_theta_local}
    return out | {
        "rope_local_base_freq": cfg.rope_theta_local,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }
