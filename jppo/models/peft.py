"""Adapters as PEFT stores them: `adapter_config.json`, `adapter_model.safetensors`.

PEFT adapts whole modules. Where a family fuses several projections into one (GPT-2,
GPT-NeoX, Phi-3), their factors are written as one pair, B block by block, which says
exactly the same; read back, every part has the fused A.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.config import ModelConfig
from jppo.models.hf_layout import Tensor, layout
from jppo.models.lora import Params, flatten, is_factor, unflatten

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
REFUSED = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


class Adapter(NamedTuple):
    """Factors (and a scalar head, if it has one) for a base model.

    base: its name or directory, empty where the file does not say.
    """

    params: Params
    scale: float
    base: str


def _modules(cfg: ModelConfig, head: bool) -> list[Tensor]:
    """The projections of a block, as the family's files have them."""
    return [
        tensor
        for tensor in layout(cfg, head=head)
        if tensor.layered and tensor.inputs and tensor.name.endswith(".weight")
    ]


def save_adapter(
    path: str | os.PathLike,
    cfg: ModelConfig,
    adapter: Params,
    *,
    base: str,
    tokenizer: Any = None,
) -> None:
    """Writes factors (and a scalar head) as a directory that `peft` opens.

    adapter: a tree from `init_adapter`, with a `head` or without; cfg.lora_scale is
    its α/r. base: directory or name of the model that it belongs to. A head's bias
    has no place in the format: it must be 0.

    Raises FileExistsError if `path` has content, ValueError for a tree that is no
    adapter, a NaN, or a head with a bias.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path}: already there; choose a new directory")
    flat = {key: np.asarray(x, np.float32) for key, x in flatten(adapter).items()}
    head = "head/kernel" in flat
    if odd := [key for key in flat if not (is_factor(key) or key.startswith("head/"))]:
        raise ValueError(f"{odd[0]} is no part of an adapter")
    if bad := [key for key, x in flat.items() if not np.isfinite(x).all()]:
        raise ValueError(f"{bad[0]} has a NaN or an infinity; not saved")
    if head and flat["head/bias"].any():
        raise ValueError("the adapter's head has a bias, which PEFT cannot store")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    depths = {len(x) for key, x in flat.items() if is_factor(key)}
    first = cfg.n_layers - max(depths)
    for module in _modules(cfg, head):
        if not any(_path(key) + "/lora_a" in flat for key in module.leaves):
            continue
        name = module.name.removesuffix(".weight")
        for i in range(max(depths)):
            a, b = _joined(module, flat, i)
            at = PREFIX + name.format(i=first + i)
            tensors[f"{at}.lora_A.weight"] = np.ascontiguousarray(a)
            tensors[f"{at}.lora_B.weight"] = np.ascontiguousarray(b)
            ranks[name.rpartition("{i}.")[2]] = len(a)
    if head:
        tensors[f"{PREFIX}score.weight"] = np.ascontiguousarray(flat["head/kernel"].T)
    config = _config(cfg, ranks, base, head, first)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as tmp:
        new = Path(tmp) / "new"
        new.mkdir()
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        (new / WEIGHTS).chmod((new / CONFIG).stat().st_mode)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        os.rename(new, path)


def _path(key: str) -> str:
    return key.rpartition("/")[0]


def _joined(module: Tensor, flat: dict[str, np.ndarray], i: int):
    """(A [r, inputs], B [outputs, r]) of one module: its parts side by side."""
    parts = {
        key: (flat[_path(key) + "/lora_a"][i], flat[_path(key) + "/lora_b"][i])
        for key in module.leaves
        if _path(key) + "/lora_a" in flat
    }
    rank = sum(b.shape[0] for _, b in parts.values())
    a = np.concatenate([a.reshape(-1, a.shape[-1]) for a, _ in parts.values()], axis=1)
    blocks, at = {}, 0
    for key, shape in module.leaves.items():
        block = np.zeros((rank, *shape[module.inputs :]), np.float32)
        if key in parts:
            b = parts[key][1]
            block[at : at + len(b)] = b
            at += len(b)
        blocks[key] = block
    return a.T, _b_of(module, rank).join(blocks)


def _b_of(module: Tensor, rank: int) -> Tensor:
    """B of a module: as its weight, with the rank for inputs."""
    leaves = {k: (rank, *s[module.inputs :]) for k, s in module.leaves.items()}
    return module._replace(leaves=leaves, inputs=1, flip=True)


def _config(
    cfg: ModelConfig, ranks: dict[str, int], base: str, head: bool, first: int
) -> dict[str, Any]:
    r = max(ranks.values())
    odd = {name: rank for name, rank in ranks.items() if rank != r}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": r,
        "lora_alpha": cfg.lora_scale * r,
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "rank_pattern": odd,
        "alpha_pattern": {name: cfg.lora_scale * rank for name, rank in odd.items()},
        "layers_to_transform": list(range(first, cfg.n_layers)) if first else None,
        "modules_to_save": ["score"] if head else None,
        "fan_in_fan_out": cfg.family == "gpt2",
        "bias": "none",
        "inference_mode": True,
    }


def load_adapter(path: str | os.PathLike, cfg: ModelConfig) -> Adapter:
    """Reads a LoRA adapter that PEFT or `save_adapter` wrote, for a model of `cfg`.

    Layers that it does not adapt get factors of 0. Raises FileNotFoundError, and
    ValueError naming a feature, module or tensor that does not fit.
    """
    path = Path(path)
    raw = adapter_config(path)
    tensors = _read(path / WEIGHTS)
    head = f"{PREFIX}score.weight" in tensors
    scales = _Scales(raw)
    flat: dict[str, np.ndarray] = {}
    for module in _modules(cfg, head):
        name = module.name.removesuffix(".weight")
        stems = [PREFIX + name.format(i=i) for i in range(cfg.n_layers)]
        found = [
            tuple(tensors.pop(f"{stem}.lora_{x}.weight", None) for x in "AB")
            for stem in stems
        ]
        if all(a is None and b is None for a, b in found):
            continue
        scale = scales.of(name.rpartition("{i}.")[2])
        _place(module, found, scale / scales.main, flat, path)
    if head:
        score = tensors.pop(f"{PREFIX}score.weight")
        if score.shape != (1, cfg.d_model):
            raise ValueError(
                f"{path}: score.weight has shape {score.shape}, expected"
                f" {(1, cfg.d_model)}: jppo's heads have one label"
            )
        flat["head/kernel"] = score.T
        flat["head/bias"] = np.zeros(1, np.float32)
    if tensors:
        some = ", ".join(sorted(tensors)[:3])
        raise ValueError(f"{path}: {len(tensors)} unexpected tensor(s): {some}")
    return Adapter(
        unflatten(flat), scales.main, raw.get("base_model_name_or_path") or ""
    )


def adapter_config(path: Path) -> dict[str, Any]:
    """The checked `adapter_config.json` of a directory."""
    file = path / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; is this an adapter directory?")
    try:
        raw = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file}: not JSON ({e})") from None
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type {raw.get('peft_type')!r} is not 'LORA'")
    for key, allowed in REFUSED.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{file}: {key} = {raw[key]!r} is not supported")
    return raw


class _Scales:
    """α/r of each module: PEFT may say other ranks and α for some."""

    def __init__(self, raw: dict[str, Any]):
        self.raw = raw
        self.main = self._scale(raw["r"], raw["lora_alpha"])

    def _scale(self, r: int | float, alpha: int | float) -> float:
        return alpha / (r**0.5 if self.raw.get("use_rslora") else r)

    def of(self, module: str) -> float:
        def said(table: str, default: int | float) -> int | float:
            for name, value in (self.raw.get(table) or {}).items():
                if module.endswith(name):
                    return value
            return default

        r = said("rank_pattern", self.raw["r"])
        return self._scale(r, said("alpha_pattern", self.raw["lora_alpha"]))


def _place(
    module: Tensor,
    found: list[tuple[Any, ...]],
    scale: float,
    flat: dict[str, np.ndarray],
    path: Path,
) -> None:
    """Stacks one module's factors under the leaves that it adapts."""
    rank = next(len(a) for a, _ in found if a is not None)
    out, ins = module._replace(flip=True).shape
    first = next(iter(module.leaves.values()))[: module.inputs]
    for i, (a, b) in enumerate(found):
        a = np.zeros((rank, ins), np.float32) if a is None else a
        b = np.zeros((out, rank), np.float32) if b is None else b
        if a.shape != (rank, ins) or b.shape != (out, rank):
            raise ValueError(
                f"{path}: {module.name.format(i=i)} has factors {a.shape} and"
                f" {b.shape}, expected {(rank, ins)} and {(out, rank)}"
            )
        for key, block in _b_of(module, rank).cut(b * np.float32(scale)).items():
            for name, x in (("lora_a", a.T.reshape(*first, rank)), ("lora_b", block)):
                leaf = f"{_path(key)}/{name}"
                if leaf not in flat:
                    flat[leaf] = np.zeros((len(found), *x.shape), np.float32)
                flat[leaf][i] = x


def _read(file: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not file.is_file():
        hint = " (a .bin file is a pickle, which jppo does not open)"
        raise FileNotFoundError(f"{file}: no such file{hint}")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{file}: not a complete safetensors file ({e})") from None
    for name, x in tensors.items():
        if not np.isfinite(np.asarray(x, np.float32)).all():
            raise ValueError(f"{file}: {name} has a NaN or an infinity")
    return {name: np.asarray(x, np.float32) for name, x in tensors.items()}
