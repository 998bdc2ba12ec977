"""Gradients as sums over parts, and optimizer steps that a bad one cannot spoil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jppo.types import Params

Metrics = dict[str, Float[Array, ""]]


def summed(fn: Callable[[Any], tuple[Any, Metrics]], parts: Any) -> tuple[Any, Metrics]:
    """Σ over parts of fn(part) = (tree, metrics), one part after another.

    parts: leaves `[n, …]`. Metrics whose name ends in `_max` keep the largest.
    """
    n = len(jax.tree.leaves(parts)[0])
    first = jax.tree.map(lambda a: a[0], parts)
    if n == 1:
        return fn(first)

    def add(total, part):
        tree, found = fn(part)
        old_tree, old = total
        found = {
            k: jnp.maximum(old[k], v) if k.endswith("_max") else old[k] + v
            for k, v in found.items()
        }
        return (jax.tree.map(jnp.add, old_tree, tree), found), None

    shapes = jax.eval_shape(fn, first)
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return jax.lax.scan(add, zero, parts)[0]


def keep_if(ok: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The new tree where ok, else the old one."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def guarded_update(
    tx: optax.GradientTransformation, params: Params, opt: Any, grads: Params
) -> tuple[Params, Any, Metrics]:
    """One optimizer step; a non-finite gradient skips it, moments included."""
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(norm)
    updates, new_opt = tx.update(grads, opt, params)
    new = optax.apply_updates(params, updates)
    params, opt = keep_if(ok, (new, new_opt), (params, opt))
    return params, opt, {"grad_norm": norm, "skipped": 1.0 - ok.astype(jnp.float32)}
