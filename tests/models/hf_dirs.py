"""A tiny model and the ways to spoil its directory, for the tests of weight files."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from jppo.config import ModelConfig
from jppo.models.hf_layout import layout

CFG = ModelConfig(
    vocab_size=11,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    d_mlp=64,
    rope_theta=1e5,
    max_positions=32,
)


def random_params(cfg: ModelConfig, *, head: bool = False) -> dict:
    rng = np.random.default_rng(0)
    flat = {}
    for tensor in layout(cfg, head=head):
        lead = (cfg.n_layers,) if tensor.layered else ()
        for key, shape in tensor.leaves.items():
            flat[key] = jnp.asarray(rng.normal(size=lead + shape), jnp.float32)
    return unflatten_dict(flat, sep="/")


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    file.write_text(json.dumps(config))


def edit_tensors(folder: Path, **changes) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, file)
