"""`config.json` of a model directory, to and from `ModelConfig`.

Reading is strict: whatever would change the logits and is not in jppo's decoder is
refused by name, so that no config yields a model that is silently another one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jppo.config import ModelConfig
from jppo.models.families import FAMILIES, Family
from jppo.models.hf_rope import rope_from_json, rope_to_json
from jppo.models.tokenizer import special_token_ids

ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


class Raw:
    """A config.json under our key names; every error names file and key."""

    def __init__(self, tree: dict[str, Any], family: Family, file: Path):
        self.tree, self.family, self.file = tree, family, file

    def fail(self, message: str) -> ValueError:
        return ValueError(f"{self.file}: {message}")

    def get(self, name: str) -> Any:
        """Its value there, `transformers`' default where the key is absent."""
        return self.tree.get(self.family.key(name), self.family.defaults.get(name))

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{self.family.key(name)} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(
                f"{self.family.key(name)} = {value!r} is not a positive integer"
            )
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.fail(
                f"{self.family.key(name)} = {value!r} is not a positive number"
            )
        return float(value)

    def maybe(self, name: str) -> float | None:
        return None if self.get(name) is None else self.positive(name)


def config_from_json(file: Path, *, dtype: str) -> tuple[ModelConfig, bool | None]:
    """The model's config, and whether it has a scalar head (None: not said).

    Raises FileNotFoundError without the file, ValueError naming what is unsupported,
    missing or contradictory in it.
    """
    raw = Raw(*_read(file), file)
    family = raw.family
    kinds = raw.tree.get("architectures") or []
    for kind in kinds:
        if kind not in (family.causal_class, family.scorer_class):
            raise raw.fail(
                f"architecture {kind} is not {family.causal_class} or"
                f" {family.scorer_class}"
            )
    if quantized := raw.tree.get("quantization_config"):
        raise raw.fail(f"quantization_config = {quantized!r} is not supported")
    for key, allowed in family.only.items():
        if raw.tree.get(key, allowed[0]) not in allowed:
            raise raw.fail(f"{key} = {raw.tree[key]!r} is not supported")
    d, h = raw.count("hidden_size"), raw.count("num_attention_heads")
    kv = raw.count("num_key_value_heads", default=h) if family.grouped else h
    if h % kv:
        raise raw.fail(f"{h} query heads cannot share {kv} key-value heads")
    if raw.get("head_dim") is None and d % h:
        raise raw.fail(f"hidden_size {d} is not a multiple of {h} heads")
    cfg = ModelConfig(
        vocab_size=raw.count("vocab_size"),
        d_model=d,
        n_layers=raw.count("num_hidden_layers"),
        n_heads=h,
        n_kv_heads=kv,
        head_dim=raw.count("head_dim", default=d // h),
        d_mlp=raw.count("intermediate_size", default=4 * d if _wide(family) else None),
        family=family.name,
        norm_eps=raw.positive("rms_norm_eps", default=1e-6),
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        max_positions=raw.count("max_position_embeddings", default=2048),
        dtype=dtype,
        **_traits(raw, d),
    )
    return cfg, family.scorer_class in kinds if kinds else None


def _wide(family: Family) -> bool:
    return family.name == "gpt2"  # n_inner = null is 4 · d


def _read(file: Path) -> tuple[dict[str, Any], Family]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; is this a model directory?")
    try:
        raw = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file}: not JSON ({e})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: not a JSON object")
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{file}: model_type {kind!r} is not supported, only {known}")
    return raw, FAMILIES[kind]


def _traits(raw: Raw, d: int) -> dict[str, Any]:
    """The fields of ModelConfig in which families and their members differ."""
    family = raw.family
    found = dict(family.traits)
    for key, fields in family.flags.items():
        value = raw.get(key) or False
        if not isinstance(value, bool):
            raise raw.fail(f"{key} = {value!r} is not true or false")
        found |= dict.fromkeys(fields, value)
    act = raw.get("hidden_act") or "silu"
    if "act" in found:  # Gemma's first configs say gelu and mean its approximation
        wanted = {"gelu_pytorch_tanh", "gelu"} if family.name == "gemma" else None
        if act not in (wanted or {"gelu_pytorch_tanh"}):
            raise raw.fail(f"{family.key('hidden_act')} {act!r} is not supported")
    elif act in ACTS:
        found["act"] = ACTS[act]
    else:
        known = ", ".join(ACTS)
        raise raw.fail(
            f"{family.key('hidden_act')} {act!r} is not supported, only {known}"
        )
    if family.name.startswith("gemma"):
        found["embed_scale"] = d**0.5
        scalar = raw.maybe("query_pre_attn_scalar")
        found["query_scale"] = None if scalar is None else scalar**-0.5
        found["attn_softcap"] = raw.maybe("attn_logit_softcapping")
        found["final_softcap"] = raw.maybe("final_logit_softcapping")
    if family.traits.get("positions") != "learned":
        found |= rope_from_json(raw)
    return found | _layers(raw)


def _layers(raw: Raw) -> dict[str, Any]:
    """window and layers: which layers slide, and which have no rotary embedding."""
    n, how = raw.count("num_hidden_layers"), raw.family.windows
    window = raw.get("sliding_window") if how != "none" else None
    if how in ("last", "nope") and not raw.get("use_sliding_window"):
        window = None
    if window is not None:
        window = raw.count("sliding_window")
    kinds = _layer_types(raw, n) if how in ("last", "nope", "pattern") else None
    if kinds is None:
        sliding = {
            "all": lambda i: True,
            "last": lambda i: i >= (raw.get("max_window_layers") or 28),
            "pattern": lambda i: (i + 1) % raw.count("sliding_window_pattern") != 0,
        }.get(how, lambda i: False)
        kinds = ["sliding" if window and sliding(i) else "full" for i in range(n)]
    if window is None:
        kinds = ["full"] * n
    if how == "nope":
        kinds = _without_rope(raw, kinds, window)
    if "sliding" not in kinds and "sliding-nope" not in kinds:
        window = None
    plain = set(kinds) == ({"sliding"} if window else {"full"})
    return {"window": window, "layers": () if plain else tuple(kinds)}


def _layer_types(raw: Raw, n: int) -> list[str] | None:
    types = raw.tree.get("layer_types")
    if types is None:
        return None
    if len(types) != n or not set(types) <= set(KINDS):
        raise raw.fail(
            f"layer_types must be {n} of {', '.join(KINDS)}, got {len(types)}:"
            f" {sorted(set(types))}"
        )
    return [KINDS[kind] for kind in types]


def _without_rope(raw: Raw, kinds: list[str], window: int | None) -> list[str]:
    """SmolLM3: every fourth layer has no rotary embedding, or those marked 0."""
    every = raw.tree.get("no_rope_layer_interval", 4)
    marks = raw.tree.get("no_rope_layers")
    if marks is None:
        marks = [int((i + 1) % every != 0) for i in range(len(kinds))]
    if len(marks) < len(kinds):
        raise raw.fail(f"no_rope_layers has {len(marks)} marks for {len(kinds)} layers")
    if window and raw.tree.get("layer_types") is None:  # only those slide
        kinds = ["full" if mark else "sliding" for mark in marks[: len(kinds)]]
    nope = {"full": "nope", "sliding": "sliding-nope"}
    return [
        kind if mark else nope[kind]
        for kind, mark in zip(kinds, marks, strict=False)
    ]  # fmt: skip


def config_to_json(
    cfg: ModelConfig, *, head: bool, dtype: str, tokenizer: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of `config.json` and of `generation_config.json`."""
    if cfg.family not in FAMILIES:
        raise ValueError(f"family {cfg.family!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[cfg.family]
    ids = special_token_ids(tokenizer)
    act = "gelu_pytorch_tanh" if cfg.act == "gelu_tanh" else cfg.act
    config: dict[str, Any] = {
        "architectures": [family.scorer_class if head else family.causal_class],
        "model_type": family.name,
        "vocab_size": cfg.vocab_size,
        family.key("hidden_size"): cfg.d_model,
        family.key("intermediate_size"): cfg.d_mlp,
        family.key("num_hidden_layers"): cfg.n_layers,
        family.key("num_attention_heads"): cfg.n_heads,
        family.key("hidden_act"): act,
        family.key("max_position_embeddings"): cfg.max_positions,
        family.key("rms_norm_eps"): cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "torch_dtype": dtype,
        **ids,
    }
    if family.grouped:
        config["num_key_value_heads"] = cfg.n_kv_heads
        config["head_dim"] = cfg.head_dim
    config |= {key: getattr(cfg, fields[0]) for key, fields in family.flags.items()}
    config |= {key: values[0] for key, values in family.only.items()}
    if family.name in ("gemma2", "gemma3_text"):
        scalar = (cfg.query_scale or cfg.head_dim**-0.5) ** -2
        whole = round(scalar)
        config["query_pre_attn_scalar"] = (
            whole if abs(scalar - whole) < 1e-6 * scalar else scalar
        )
        config["attn_logit_softcapping"] = cfg.attn_softcap
        config["final_logit_softcapping"] = cfg.final_softcap
    if cfg.positions == "rope":
        config |= rope_to_json(cfg, family)
    config |= _layers_to_json(cfg, family)
    if head:
        config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    _check_same(config, cfg, family)
    known = {key: value for key, value in ids.items() if value is not None}
    return config, {"_from_model_config": True, **known}


def _layers_to_json(cfg: ModelConfig, family: Family) -> dict[str, Any]:
    if family.windows == "none":
        return {}
    out: dict[str, Any] = {"sliding_window": cfg.window}
    if family.windows == "all":
        return out
    kinds = cfg.layers or ("sliding" if cfg.window else "full",) * cfg.n_layers
    slides = {True: "sliding_attention", False: "full_attention"}
    out["layer_types"] = [slides["sliding" in kind] for kind in kinds]
    if family.windows in ("last", "nope"):
        out["use_sliding_window"] = cfg.window is not None
    if family.windows == "nope":
        out["no_rope_layers"] = [int("nope" not in kind) for kind in kinds]
    return out


def _check_same(config: dict[str, Any], cfg: ModelConfig, family: Family) -> None:
    """A trait that this family's config cannot say would be lost without a word."""
    raw = Raw(config, family, Path("config.json"))
    said = _traits(raw, cfg.d_model)
    for key, value in said.items():
        ours = getattr(cfg, key)
        if ours != value and not (key == "query_scale" and _near(ours, value, cfg)):
            raise ValueError(
                f"a {family.name} config cannot say {key} = {ours!r}, only {value!r}"
            )
    for key, default in (("layers", ()), ("window", None)):
        if key not in said and getattr(cfg, key) != default:
            raise ValueError(f"a {family.name} config cannot say {key}")


def _near(ours: float | None, theirs: float | None, cfg: ModelConfig) -> bool:
    plain = cfg.head_dim**-0.5
    return abs((ours or plain) - (theirs or plain)) < 1e-9
