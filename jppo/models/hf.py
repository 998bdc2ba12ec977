"""Hugging Face directories of the Llama family, read and written without torch.

`load_hf` and `save_hf` are inverse: in float32 a saved and loaded tree is equal bit
for bit, because both directions read the one table of `hf_layout`. Nothing is skipped
or guessed: a feature that the decoder does not have, a tensor too many or too few, a
wrong shape or a NaN is an error that names the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict

from jppo.config import ModelConfig
from jppo.models.hf_config import config_from_json, config_to_json
from jppo.models.hf_layout import Params, layout, params_from

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")


def load_hf(
    path: str | os.PathLike, *, dtype: str = "float32", host: bool = False
) -> tuple[ModelConfig, Params]:
    """Reads `config.json` and the safetensors of a local Llama directory.

    Params are float32 whatever the file holds; `dtype` is the compute dtype noted in
    the config. A `LlamaForSequenceClassification` with one label comes back with
    `params["head"]`, whose bias is `score.bias` or zero. `host=True` leaves the leaves
    as NumPy arrays, to be placed on a mesh by the caller.

    Raises FileNotFoundError for what is not there, and ValueError for a feature that
    jppo's decoder lacks, a tensor missing, unexpected, misshapen or not finite.
    """
    check_dtype(dtype)
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such directory (models are read from disk, never downloaded)"
        )
    cfg, head = config_from_json(path / "config.json", dtype=dtype)
    with open_weights(path) as (names, read):
        if head is None:
            head = "score.weight" in names
        params = params_from(cfg, names, read, head=head, where=path)
    return cfg, params if host else jax.tree.map(jnp.asarray, params)


@contextlib.contextmanager
def open_weights(
    path: Path,
) -> Iterator[tuple[set[str], Callable[[str], np.ndarray]]]:
    """Tensor names of a directory, and a function that reads one from the disk."""
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        where: dict[str, tuple[Any, Path]] = {}
        for file in _weight_files(path):
            try:
                f = stack.enter_context(safe_open(file, framework="numpy"))
            except (SafetensorError, OSError) as e:
                raise ValueError(
                    f"{file}: not a complete safetensors file ({e})"
                ) from None
            for name in f.keys():  # noqa: SIM118, safe_open is no mapping
                if name in where:
                    raise ValueError(f"{file}: {name} is in {where[name][1].name} too")
                where[name] = f, file

        def read(name: str) -> np.ndarray:
            f, file = where[name]
            kind = f.get_slice(name).get_dtype()
            if kind not in ("F32", "F16", "BF16", "F64"):
                raise ValueError(f"{file}: {name} is {kind}; jppo reads float weights")
            x = f.get_tensor(name).astype(np.float32)
            if not np.isfinite(x).all():
                raise ValueError(f"{file}: {name} has a NaN or an infinity")
            return x

        yield set(where), read


def _weight_files(path: Path) -> list[Path]:
    if (path / ONE_FILE).is_file():
        return [path / ONE_FILE]
    if not (path / INDEX).is_file():
        suffixes = {".bin", ".pt", ".pth"}
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in suffixes)
        if pickles:
            raise ValueError(
                f"{path}: {pickles[0]} is a pickle, which jppo does not open; convert "
                "it where torch is installed: AutoModelForCausalLM.from_pretrained"
                f"({str(path)!r}).save_pretrained(NEW_DIRECTORY)"
            )
        raise FileNotFoundError(f"{path}: neither {ONE_FILE} nor {INDEX}")
    try:
        names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path / INDEX}: no JSON object with a weight_map") from None
    files = [path / Path(str(name)).name for name in sorted(names, key=str)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: named in {INDEX}, but not there")
    return files


def save_hf(
    path: str | os.PathLike,
    cfg: ModelConfig,
    params: Params,
    tokenizer: Any = None,
    *,
    dtype: str = "float32",
) -> None:
    """Writes a directory that `load_hf` and `transformers` open; all of it or nothing.

    Params with a `head` become a `LlamaForSequenceClassification` with one label. Its
    bias has no place there: if it is not zero it is stored as `score.bias`, which
    `load_hf` reads and `transformers` reports as an unexpected key.

    Raises FileExistsError if `path` has content, ValueError if the tree does not fit
    `cfg`, has a NaN, or the tokenizer has more ids than the model.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path}: already there; choose a new directory")
    check_dtype(dtype)
    if tokenizer is not None and len(tokenizer) > cfg.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} ids, the model {cfg.vocab_size}"
        )
    from safetensors.numpy import save_file

    tensors = _to_hf(cfg, params, DTYPES[dtype])
    config, generation = config_to_json(
        cfg, head="head" in params, dtype=dtype, tokenizer=tokenizer
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as tmp:
        new = Path(tmp) / "new"
        new.mkdir()  # with the umask's permissions, unlike the temporary directory
        save_file(tensors, new / ONE_FILE, metadata={"format": "pt"})
        for name, content in (
            ("config.json", config),
            ("generation_config.json", generation),
        ):
            (new / name).write_text(json.dumps(content, indent=2) + "\n")
        # safetensors leaves 0600; others may read it if they may read the rest
        (new / ONE_FILE).chmod((new / "config.json").stat().st_mode)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        os.rename(new, path)


def _to_hf(cfg: ModelConfig, params: Params, dtype: Any) -> dict[str, np.ndarray]:
    flat = flatten_dict(params, sep="/")
    leaves = layout(cfg, head="head" in params)
    if flat.keys() != leaves.keys():
        odd = ", ".join(sorted(flat.keys() ^ leaves.keys())[:3])
        raise ValueError(f"the param tree does not fit the config: {odd}")
    out: dict[str, np.ndarray] = {}
    for key, leaf in leaves.items():
        value = np.asarray(flat[key], np.float32)
        stacked = "{i}" in leaf.name
        shape = (cfg.n_layers, *leaf.shape) if stacked else leaf.shape
        if value.shape != shape:
            raise ValueError(f"{key} has shape {value.shape}, expected {shape}")
        if not np.isfinite(value).all():
            raise ValueError(f"{key} has a NaN or an infinity; not saved")
        if key == "head/bias" and not value.any():
            continue
        for i, x in enumerate(value if stacked else value[None]):
            x = np.ascontiguousarray(leaf.to_hf(x).astype(dtype))
            out[leaf.name.format(i=i)] = x
    return out
