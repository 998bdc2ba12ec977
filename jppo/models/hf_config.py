"""`config.json` of a Llama directory, to and from `ModelConfig`.

Reading is strict: whatever would change the logits and is not in jppo's decoder is
refused by name, so that no config yields a model that is silently another one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jppo.config import ModelConfig

LM = "LlamaForCausalLM"
SCORER = "LlamaForSequenceClassification"
SWITCHES = ("attention_bias", "mlp_bias", "rope_interleaved", "quantization_config")


def config_from_json(file: Path, *, dtype: str) -> tuple[ModelConfig, bool | None]:
    """The model's config, and whether it has a scalar head (None: not said).

    Raises FileNotFoundError without the file, ValueError naming what is unsupported,
    missing or contradictory in it.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; is this a model directory?")
    try:
        raw = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file}: not JSON ({e})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: not a JSON object")
    _refuse_unsupported(raw, file)
    d, h = _count(raw, "hidden_size", file), _count(raw, "num_attention_heads", file)
    kv = _count(raw, "num_key_value_heads", file, default=h)
    if h % kv:
        raise ValueError(f"{file}: {h} query heads cannot share {kv} key-value heads")
    if raw.get("head_dim") is None and d % h:
        raise ValueError(f"{file}: hidden_size {d} is not a multiple of {h} heads")
    head_dim = _count(raw, "head_dim", file, default=d // h)
    if head_dim % 2:
        raise ValueError(f"{file}: head_dim {head_dim} is odd, rotary pairs need two")
    cfg = ModelConfig(
        vocab_size=_count(raw, "vocab_size", file),
        d_model=d,
        n_layers=_count(raw, "num_hidden_layers", file),
        n_heads=h,
        n_kv_heads=kv,
        head_dim=head_dim,
        d_mlp=_count(raw, "intermediate_size", file),
        rope_theta=_rope_theta(raw, file),
        norm_eps=_positive(raw, "rms_norm_eps", file, default=1e-6),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_positions=_count(raw, "max_position_embeddings", file, default=2048),
        dtype=dtype,
    )
    kinds = raw.get("architectures") or []
    return cfg, SCORER in kinds if kinds else None


def _refuse_unsupported(raw: dict[str, Any], file: Path) -> None:
    if raw.get("model_type") != "llama":
        kind = raw.get("model_type")
        raise ValueError(f"{file}: model_type {kind!r} is not supported, only 'llama'")
    for kind in raw.get("architectures") or []:
        if kind not in (LM, SCORER):
            raise ValueError(f"{file}: architecture {kind} is not {LM} or {SCORER}")
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"{file}: hidden_act {act!r} is not supported, only 'silu'")
    for key in SWITCHES:
        if raw.get(key):
            raise ValueError(f"{file}: {key} = {raw[key]!r} is not supported")
    for key in ("rope_scaling", "rope_parameters"):
        _refuse_scaling(raw.get(key), key, file)


def _refuse_scaling(rope: Any, key: str, file: Path) -> None:
    if rope is None:
        return
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
    plain = isinstance(rope, dict) and kind in (None, "default")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if not plain or not rope.keys() <= known:
        raise ValueError(f"{file}: {key} = {rope!r} is not supported, only 'default'")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"{file}: {key}.partial_rotary_factor is not supported")


def _rope_theta(raw: dict[str, Any], file: Path) -> float:
    """Its base: a key of its own before transformers 5, in rope_parameters since."""
    nested = raw.get("rope_parameters") or {}
    if nested.get("rope_theta") is None:
        return _positive(raw, "rope_theta", file, default=10000.0)
    theta = _positive(nested, "rope_theta", file)
    if _positive(raw, "rope_theta", file, default=theta) != theta:
        raise ValueError(
            f"{file}: rope_theta is {raw['rope_theta']} and in rope_parameters {theta}"
        )
    return theta


def _count(
    raw: dict[str, Any], key: str, file: Path, *, default: int | None = None
) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{file}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{file}: {key} = {value!r} is not a positive integer")
    return value


def _positive(
    raw: dict[str, Any], key: str, file: Path, *, default: float | None = None
) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{file}: {key} = {value!r} is not a positive number")
    return float(value)


def config_to_json(
    cfg: ModelConfig, *, head: bool, dtype: str, tokenizer: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of `config.json` and of `generation_config.json`."""
    ids = {
        key: None if tokenizer is None else getattr(tokenizer, key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = {
        "architectures": [SCORER if head else LM],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_mlp,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.norm_eps,
        # transformers 4 reads the first, 5 the second
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "tie_word_embeddings": cfg.tie_embeddings,
        "torch_dtype": dtype,
        **ids,
    }
    if head:
        config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    known = {key: value for key, value in ids.items() if value is not None}
    return config, {"_from_model_config": True, **known}
