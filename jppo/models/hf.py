"""Hugging Face directories, read and written without torch.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.config import ModelConfig
from jppo.models.hf_config import config_from_json, config_to_json
from jppo.models.hf_layout import layout
from jppo.models.hf_read import Layers, Params, Place, on_host, params_from
from jppo.models.lora import is_factor, merged_layer
from jppo.sharding import TRAIN_RULES, Rules, tree_shardings

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")


def load_hf(
    path: str | os.PathLike,
    *,
    dtype: str = "float32",
    host: bool = False,
    mesh: Mesh | None = None,
    rules: Rules = TRAIN_RULES,
) -> tuple[ModelConfig, Params]:
    """Reads `config.json` and the safetensors of a local model directory.

    Params are float32 whatever the file holds; `dtype` is the compute dtype noted in
    the config. A model for sequence classification with one label comes back with
    `params["head"]`, whose bias is `score.bias` or zero.

    Leaves go to the default device. With a mesh each is laid out by `rules`, filled a
    layer at a time: the host holds one tensor, each device its part. `host=True`
    leaves NumPy arrays, to be placed by the caller.

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
    if mesh is not None:
        place = on_mesh(mesh, rules)
    else:
        place = on_host if host else on_device
    with open_weights(path) as (names, read):
        if head is None:
            head = "score.weight" in names
        return cfg, params_from(cfg, names, read, head=head, where=path, place=place)


def on_device(key: str, shape: tuple[int, ...], layers: Layers) -> jax.Array:
    """A leaf on the default device."""
    return jnp.asarray(on_host(key, shape, layers))


def on_mesh(mesh: Mesh, rules: Rules = TRAIN_RULES) -> Place:
    """Makes leaves on a mesh, filled in place a layer at a time."""

    def place(key: str, shape: tuple[int, ...], layers: Layers) -> jax.Array:
        whole = tree_shardings({key: jax.ShapeDtypeStruct(shape, jnp.float32)}, mesh,
                               rules)[key]  # fmt: skip
        if not key.startswith("blocks/"):
            return _spread(next(layers), whole)
        part = NamedSharding(mesh, PartitionSpec(*whole.spec[1:]))
        fill = jax.jit(
            lambda leaf, x, i: jax.lax.dynamic_update_index_in_dim(leaf, x, i, 0),
            donate_argnums=0,
            out_shardings=whole,
        )
        leaf = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=whole)()
        for i, x in enumerate(layers):
            leaf = fill(leaf, _spread(x, part), i)
            # Or reading runs ahead, and the host holds every layer that waits.
            jax.block_until_ready(leaf)
        return leaf

    return place


def _spread(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array, of which each process hands over the parts that it holds."""
    x = np.asarray(x, np.float32)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])


@contextlib.contextmanager
def open_weights(
    path: Path,
) -> Iterator[tuple[set[str], Callable[[str], np.ndarray]]]:
    """Tensor names of a directory, and a function that reads one from the disk."""
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        where: dict[str, tuple[Any, Path]] = {}
        for file in weight_files(path):
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


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory, all of which are there."""
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
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a directory that `load_hf` and `transformers` open; all of it or nothing.

    Weights beyond `max_shard_bytes` go to several files with an index; no more than
    one file's tensors are on the host at a time.

    Params with a `head` become a model for sequence classification with one label.
    Its bias has no place there: if it is not zero it is stored as `score.bias`, which
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
    config, generation = config_to_json(
        cfg, head="head" in params, dtype=dtype, tokenizer=tokenizer
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as tmp:
        new = Path(tmp) / "new"
        new.mkdir()  # with the umask's permissions, unlike the temporary directory
        for name, content in (
            ("config.json", config),
            ("generation_config.json", generation),
        ):
            (new / name).write_text(json.dumps(content, indent=2) + "\n")
        write_tensors(new, tensors_of(cfg, params, DTYPES[dtype]), max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        os.rename(new, path)


def write_tensors(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int
) -> None:
    """`model.safetensors`, or numbered files and their index."""
    from safetensors.numpy import save_file

    mode = (folder / "config.json").stat().st_mode
    files: list[tuple[Path, list[str]]] = []
    total = size = 0
    shard: dict[str, np.ndarray] = {}

    def flush() -> None:
        file = folder / f"part-{len(files)}"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(mode)  # safetensors leaves 0600; read it who may read the rest
        files.append((file, list(shard)))
        shard.clear()

    for name, x in tensors:
        if shard and size + x.nbytes > max_bytes:
            flush()
            size = 0
        shard[name], size, total = x, size + x.nbytes, total + x.nbytes
    flush()
    if len(files) == 1:
        files[0][0].rename(folder / ONE_FILE)
        return
    where: dict[str, str] = {}
    for i, (file, names) in enumerate(files, 1):
        name = f"model-{i:05}-of-{len(files):05}.safetensors"
        file.rename(folder / name)
        where |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def tensors_of(
    cfg: ModelConfig, params: Params, dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array) of a whole model, one after another.

    Adapters in the tree are merged into the weights that they stand beside.
    """
    flat: dict[str, Any] = dict(flatten_dict(params, sep="/"))
    tensors = layout(cfg, head="head" in params)
    shapes = {
        key: (cfg.n_layers, *shape) if tensor.layered else shape
        for tensor in tensors
        for key, shape in tensor.leaves.items()
    }
    if odd := {key for key in flat if not is_factor(key)} ^ shapes.keys():
        odd = ", ".join(sorted(odd)[:3])
        raise ValueError(f"the param tree does not fit the config: {odd}")
    for key, shape in shapes.items():
        if flat[key].shape != shape:
            raise ValueError(f"{key} has shape {flat[key].shape}, expected {shape}")

    def host(key: str, at: Any = ...) -> np.ndarray:
        x = merged_layer(flat, key, at, cfg.lora_scale)
        if not np.isfinite(x).all():
            raise ValueError(f"{key} has a NaN or an infinity; not saved")
        return x

    for tensor in tensors:
        for i in range(cfg.n_layers) if tensor.layered else (...,):
            leaves = {key: host(key, i) for key in tensor.leaves}
            if tensor.name == "score.bias" and not leaves["head/bias"].any():
                continue
            x = tensor.join(leaves).astype(dtype)
            yield tensor.name.format(i=i), np.ascontiguousarray(x)
