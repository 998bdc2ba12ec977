"""Low-rank adapters: a few trained factors beside frozen projections.

    y = x W + α/r · (x A) B            LoRA, arXiv 2106.09685

An adapter is a param tree that holds only factors, `lora_a` and `lora_b` beside each
`kernel` that it adapts. Laid over a base (`overlay`) it makes a whole model, which
every function of jppo runs as it is; the base without it is the reference.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

Params = dict[str, Any]
FACTORS = ("lora_a", "lora_b")


def overlay(below: Params, above: Params) -> Params:
    """Both trees in one; where a leaf is in both, the one above counts."""
    out = dict(below)
    for key, value in above.items():
        under = below.get(key)
        both = isinstance(value, dict) and isinstance(under, dict)
        out[key] = overlay(under, value) if both else value  # type: ignore[arg-type]
    return out


def flatten(tree: Params) -> dict[str, Any]:
    """`/`-joined path → leaf."""
    return dict(flatten_dict(tree, sep="/"))


def unflatten(flat: dict[str, Any]) -> Params:
    """The inverse of `flatten`."""
    return unflatten_dict(flat, sep="/")


def _inputs(path: str) -> int:
    """How many axes of a projection's kernel, after the layers', are inputs."""
    return 2 if path.endswith("attn/o") else 1


def init_adapter(
    params: Params, key: Array, *, rank: int, targets: str = r"attn/|mlp/"
) -> Params:
    """Fresh factors for the projections of `params` whose path `targets` finds.

    A is uniform in ±1/√inputs and B is 0, so the adapted model starts as the base
    (PEFT's default). targets: a regex, searched in paths such as `blocks/attn/q`.
    Raises ValueError when the rank is not positive or nothing matches.
    """
    if rank < 1:
        raise ValueError(f"lora rank must be at least 1, got {rank}")
    flat = flatten({"blocks": params.get("blocks", {})})
    paths = [k.removesuffix("/kernel") for k in flat if k.endswith("/kernel")]
    chosen = [path for path in paths if re.search(targets, path)]
    if not chosen:
        raise ValueError(f"lora targets {targets!r} match none of {sorted(paths)}")
    out: dict[str, Array] = {}
    for path, k in zip(chosen, jax.random.split(key, len(chosen)), strict=True):
        n, *shape = flat[f"{path}/kernel"].shape
        inputs, outputs = shape[: _inputs(path)], shape[_inputs(path) :]
        bound = math.prod(inputs) ** -0.5
        size = (n, *inputs, rank)
        out[f"{path}/lora_a"] = jax.random.uniform(k, size, minval=-bound, maxval=bound)
        out[f"{path}/lora_b"] = jnp.zeros((n, rank, *outputs), jnp.float32)
    return unflatten(out)


def is_factor(path: str) -> bool:
    return path.rpartition("/")[2] in FACTORS


def split_adapter(params: Params) -> tuple[Params, Params]:
    """(base, adapter): a tree without its factors, and the factors alone."""
    flat = flatten(params)
    parts = ({}, {})
    for path, leaf in flat.items():
        parts[is_factor(path)][path] = leaf
    base, adapter = (unflatten(part) for part in parts)
    return base, adapter


def product(a: Any, b: Any, *, axes: int) -> Any:
    """A · B of one layer in f32, in the shape of its kernel; axes: of the inputs."""
    inputs, outputs = a.shape[:axes], b.shape[1:]
    low = a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)
    return low.reshape(*inputs, *outputs)


def merge_adapter(params: Params, scale: float) -> Params:
    """The same model without factors: kernel + scale · A B, in float32."""
    base, adapter = split_adapter(params)
    if not adapter:
        return params
    flat = dict(flatten(base))
    factors = flatten(adapter)
    for path in {key.rpartition("/")[0] for key in factors}:
        a, b = (jnp.asarray(factors[f"{path}/{x}"], jnp.float32) for x in FACTORS)
        low = jax.vmap(partial(product, axes=_inputs(path)))(a, b)
        flat[f"{path}/kernel"] = (
            flat[f"{path}/kernel"].astype(jnp.float32) + scale * low
        )
    return unflatten(flat)


def merged_layer(flat: dict[str, Any], key: str, i: Any, scale: float) -> np.ndarray:
    """Leaf `key` of layer i on the host in f32, with its factors merged in."""
    x = np.asarray(flat[key][i], np.float32)
    path, _, name = key.rpartition("/")
    if name != "kernel" or f"{path}/lora_a" not in flat:
        return x
    a, b = (np.asarray(flat[f"{path}/{f}"][i], np.float32) for f in FACTORS)
    return x + np.float32(scale) * product(a, b, axes=_inputs(path))
