"""Sums, means and variances over the valid tokens of a batch.

Every masked statistic in jppo goes through this module, so that one convention
holds everywhere: whatever stands under the mask (a NaN, an infinity, 999) changes
neither the value nor the gradient, and an empty mask gives 0 and never NaN.
Inputs are replaced *before* any arithmetic (the "double where"): a `where` on the
result alone would still multiply a zero cotangent by a NaN derivative.
Results are float32. Under jit over a mesh, sums are over the global batch.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

Scalar = float | int | Float[Array, ""]
"""A hyper-parameter that may be a Python number or a traced scalar."""

LOG_RATIO_MAX = 20.0
"""Clamp of log-ratios before exp: e^20 is finite, with room for sums over a batch."""

Axis = int | tuple[int, ...] | None

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)


def _clean(
    x: Shaped[Array, "*s"], mask: Bool[Array, "*s"]
) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
    """x as float32 with 0 under the mask, and the mask as float32."""
    chex.assert_equal_shape([x, mask])
    chex.assert_type(mask, bool)
    x = jnp.where(mask, x, jnp.zeros_like(x)).astype(jnp.float32)
    return x, mask.astype(jnp.float32)


def masked_sum(
    x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], axis: Axis = None
) -> Float[Array, "..."]:
    """Sum over the valid entries, Σ_m x.

    x and mask have one shape; axis as in `jnp.sum`. An empty mask gives 0.
    Raises AssertionError when shapes differ or the mask is not boolean.
    """
    x, _ = _clean(x, mask)
    return jnp.sum(x, axis=axis)


def masked_mean(
    x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], axis: Axis = None
) -> Float[Array, "..."]:
    """Mean over the valid entries, Σ_m x / Σ m.

    x and mask have one shape; axis as in `jnp.mean`. An empty mask gives 0.
    Raises AssertionError when shapes differ or the mask is not boolean.
    """
    x, m = _clean(x, mask)
    return jnp.sum(x, axis=axis) / jnp.maximum(jnp.sum(m, axis=axis), 1.0)


def masked_var(
    x: Shaped[Array, "*s"],
    mask: Bool[Array, "*s"],
    axis: Axis = None,
    ddof: int = 1,
) -> Float[Array, "..."]:
    """Variance over the valid entries, Σ_m (x − mean)² / (Σ m − ddof).

    Unbiased by default. No more than one valid entry gives 0 with gradient 0.
    Raises AssertionError when shapes differ or the mask is not boolean.
    """
    x, m = _clean(x, mask)
    n = jnp.sum(m, axis=axis, keepdims=True)
    mean = jnp.sum(x, axis=axis, keepdims=True) / jnp.maximum(n, 1.0)
    squares = jnp.sum(jnp.square(x - mean) * m, axis=axis)
    return squares / jnp.maximum(n.reshape(squares.shape) - ddof, 1.0)


def whiten(
    x: Shaped[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    ddof: int = 1,
    shift_mean: bool = True,
) -> Float[Array, "*s"]:
    """Zero mean and unit variance over the whole batch's valid entries.

    y = (x − mean_m) / √(var_m + 1e-8), and 0 under the mask. With
    shift_mean=False only the scale changes and the mean is added back (as done for
    rewards, N+ 2403.17031). With no more than one valid entry every y is 0 and the
    gradient is finite.
    Raises AssertionError when shapes differ or the mask is not boolean.
    """
    x, m = _clean(x, mask)
    mean = masked_mean(x, mask)
    y = (x - mean) * jax.lax.rsqrt(masked_var(x, mask, ddof=ddof) + 1e-8)
    y = y if shift_mean else y + mean
    return jnp.where(mask & (jnp.sum(m) > 1.0), y, 0.0)


def aggregate(
    x: Shaped[Array, "*b t"],
    mask: Bool[Array, "*b t"],
    *,
    mode: str = "token-mean",
    length: Scalar | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Reduce a per-token loss to (total, count), to be divided once at the end.

    token-mean                Σ_b Σ_t m x              ÷ valid tokens
    seq-mean-token-mean       Σ_b (Σ_t m x / Σ_t m)    ÷ sequences
    seq-mean-token-sum        Σ_b Σ_t m x              ÷ sequences
    seq-mean-token-sum-norm   Σ_b Σ_t m x / length     ÷ sequences

    DAPO 2503.14476 (token-mean), GRPO 2402.03300 (seq-mean-token-mean), Dr. GRPO
    2503.20783 (constant length). x [*b t]. A row without a valid token is no
    sequence: it adds 0 to both. Totals and counts of micro-batches add up.
    Raises ValueError for an unknown mode, or when seq-mean-token-sum-norm has no
    length.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {AGGREGATIONS}")
    x, m = _clean(x, mask)
    if mode == "token-mean":
        return jnp.sum(x), jnp.sum(m)
    rows, tokens = jnp.sum(x, axis=-1), jnp.sum(m, axis=-1)
    sequences = jnp.sum((tokens > 0).astype(jnp.float32))
    if mode == "seq-mean-token-mean":
        rows = rows / jnp.maximum(tokens, 1.0)
    elif mode == "seq-mean-token-sum-norm":
        if length is None:
            raise ValueError("seq-mean-token-sum-norm divides by length; got None")
        rows = rows / length
    return jnp.sum(rows), sequences
