"""What is in a path: a run, a checkpoint, a model directory, an adapter, a GGUF file.

Everything is read from headers and small files; no weights are loaded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo import settings
from jppo.checkpoint import describe
from jppo.config import ConfigError, ModelConfig
from jppo.metrics import read_jsonl
from jppo.models.hf import weight_files
from jppo.models.hf_config import config_from_json
from jppo.models.peft import CONFIG as ADAPTER
from jppo.models.peft import WEIGHTS, adapter_config
from jppo.run_folder import TITLES, read_config


class Found(NamedTuple):
    """A title, facts as (name, value), and arrays as (name, shape, dtype, bytes)."""

    title: str
    facts: list[tuple[str, str]]
    arrays: list[tuple[str, tuple[int, ...], str, int]]


def inspect(path: str | Path) -> Found:
    """Says what a path holds. Raises ConfigError where that is nothing jppo knows."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        return _gguf(path)
    if (path / "config.yaml").is_file():
        return _run(path)
    if (path / "_CHECKPOINT_METADATA").is_file():
        return _checkpoint(path)
    if (path / ADAPTER).is_file():
        return _adapter(path)
    if (path / "config.json").is_file():
        return _model(path)
    raise ConfigError(
        f"{path}: no run folder (config.yaml), checkpoint, model (config.json), adapter"
        f" ({ADAPTER}) or .gguf file"
    )


def size(n: int) -> str:
    """Bytes as people read them."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(int(math.log2(n) // 10) if n >= 1 else 0, len(units) - 1)
    return f"{n} B" if not power else f"{n / 1024**power:.2f} {units[power]}"


def _total(arrays: Iterable[tuple[str, tuple[int, ...], str, int]]) -> list:
    """Numbers of a list of arrays, as facts."""
    arrays = list(arrays)
    kinds = Counter()
    for _, shape, dtype, _ in arrays:
        kinds[dtype] += math.prod(shape)
    each = ", ".join(f"{n:,} {dtype}" for dtype, n in kinds.most_common())
    return [("values", each), ("size", size(sum(a[3] for a in arrays)))]


# Runs


def _run(path: Path) -> Found:
    cfg = read_config(path)
    facts = [("kind", TITLES[type(cfg)])]
    rows = []
    if (path / "metrics.jsonl").is_file():
        rows = [row for row in read_jsonl(path / "metrics.jsonl") if row.get("step")]
    if rows:
        facts.append(("last step", f"{rows[-1]['step']}"))
        facts += [
            (name, f"{value:.5g}")
            for name, value in rows[-1].items()
            if name != "step" and isinstance(value, (int, float))
        ]
    folder = path / "checkpoints"
    steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit())
    facts.append(("checkpoints", ", ".join(map(str, steps)) or "none"))
    for name in ("model", "reward_model", "adapter", "report.html"):
        if (path / name).exists():
            facts.append((name, str(path / name)))
    default = settings.flatten(settings.to_dict(type(cfg)()))
    mine = settings.flatten(settings.to_dict(cfg))
    facts += [(k, str(v)) for k, v in mine.items() if v != default[k]]
    return Found(f"{path}: a run", facts, [])


def _checkpoint(path: Path) -> Found:
    meta, leaves = describe(path)
    arrays = [
        (name, shape, dtype, math.prod(shape) * np.dtype(dtype).itemsize)
        for name, shape, dtype in leaves
    ]
    facts = [("step", path.name), *_total(arrays)]
    # Of the models' traits only those that are not everybody's.
    plain = {k: f.default for k, f in ModelConfig.__dataclass_fields__.items()}
    facts += [
        (k.removeprefix("identity."), str(v))
        for k, v in settings.flatten(meta).items()
        if plain.get(k.rpartition(".")[2], ...) != (tuple(v) if v == [] else v)
    ]
    return Found(f"{path}: a checkpoint", facts, arrays)


# Models


def _shape(cfg: ModelConfig, head: bool) -> list[tuple[str, str]]:
    fields = settings.flatten({k: getattr(cfg, k) for k in cfg.__dataclass_fields__})
    plain = {k: f.default for k, f in cfg.__dataclass_fields__.items()}
    shown = {k: v for k, v in fields.items() if v != plain[k] and k != "layers"}
    kind = "a reward model (one label)" if head else "a language model"
    kinds = Counter(cfg.layers)
    layers = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    return [
        ("kind", kind),
        ("family", cfg.family),
        *((k, str(v)) for k, v in shown.items() if k != "family"),
        *([("layers", layers)] if layers else []),
    ]


def _model(path: Path) -> Found:
    cfg, head = config_from_json(path / "config.json", dtype="float32")
    arrays = [a for file in weight_files(path) for a in _headers(file)]
    names = {name for name, *_ in arrays}
    facts = _shape(cfg, "score.weight" in names if head is None else head)
    return Found(f"{path}: a model", [*facts, *_total(arrays), *_vocab(path)], arrays)


def _headers(file: Path) -> list[tuple[str, tuple[int, ...], str, int]]:
    """The tensors of a safetensors file, from its header alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
            found = {
                k: (tuple(s.get_shape()), s.get_dtype()) for k, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file}: not a complete safetensors file ({error})"
        ) from None
    return [
        (name, shape, kind, math.prod(shape) * _width(kind))
        for name, (shape, kind) in found.items()
    ]


def _width(kind: str) -> int:
    """Bytes of one value of a safetensors dtype: F32, BF16, I8, F8_E4M3 …"""
    if kind == "BOOL":
        return 1
    return int("".join(c for c in kind.split("_")[0] if c.isdigit())) // 8


def _vocab(path: Path) -> list[tuple[str, str]]:
    """What of a tokenizer lies beside the weights."""
    if not (path / "tokenizer.json").is_file():
        return [("tokenizer", "none")]
    raw = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    file = path / "tokenizer_config.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    chat = told.get("chat_template") or (path / "chat_template.jinja").is_file()
    model = raw.get("model", {})
    return [
        ("tokenizer", f"{model.get('type')}, {len(model.get('vocab', ())):,} entries"),
        ("chat template", "yes" if chat else "none"),
    ]


def _adapter(path: Path) -> Found:
    raw = adapter_config(path)
    arrays = _headers(path / WEIGHTS)
    facts = [
        ("base", str(raw.get("base_model_name_or_path") or "not said")),
        ("rank", str(raw["r"])),
        ("alpha", str(raw["lora_alpha"])),
        ("targets", ", ".join(raw.get("target_modules") or ())),
        *_total(arrays),
    ]
    return Found(f"{path}: a LoRA adapter", facts, arrays)


def _gguf(path: Path) -> Found:
    from jppo.models.gguf import gguf_headers

    facts: dict[str, Any]
    facts, arrays = gguf_headers(path)
    told = [(k, str(v)) for k, v in facts.items()]
    return Found(f"{path}: a GGUF file", [*told, *_total(arrays)], arrays)
