"""What is minimised: the clipped policy loss, the value loss, and their companions.

A loss returns (total, count, metrics). total is a *sum* and count its normaliser,
both float32 scalars, so that micro-batches and devices add them up and divide once:
the gradient then does not depend on how the batch was cut. metrics are sums over
the mask as well, to be divided by metrics["tokens"], the number of valid tokens;
those named `*_max` accumulate by maximum. Only the current network's output is
differentiated: advantages, returns and everything old are constants here.
"""

import chex
import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from jppo.masked import LOG_RATIO_MAX, Scalar, aggregate, masked_sum, masked_var

Loss = tuple[Float[Array, ""], Float[Array, ""], dict[str, Float[Array, ""]]]


def _valid(x: Float[Array, "*s"], mask: Bool[Array, "*s"]) -> Float[Array, "*s"]:
    # Zeroed before any arithmetic: NaN under the mask must not reach the gradient.
    return jnp.where(mask, x, 0.0).astype(jnp.float32)


def _exceeds(log_ratio: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """ρ − 1 − log ρ ≥ 0, exact near ρ = 1."""
    return jnp.expm1(log_ratio) - log_ratio


def _sums(mask: Bool[Array, "*s"], **metrics: Array) -> dict[str, Float[Array, ""]]:
    sums = {k: masked_sum(stop_gradient(x), mask) for k, x in metrics.items()}
    return sums | {"tokens": masked_sum(mask, mask)}


def clip_loss(
    logp: Float[Array, "*b t"],
    logp_old: Float[Array, "*b t"],
    advantages: Float[Array, "*b t"],
    mask: Bool[Array, "*b t"],
    *,
    eps: Scalar = 0.2,
    eps_high: Scalar | None = None,
    dual_clip: Scalar | None = None,
    aggregation: str = "token-mean",
    length: Scalar | None = None,
    weights: Float[Array, "*b t"] | None = None,
) -> Loss:
    """Clipped surrogate objective of PPO, to be minimised (1707.06347, eq. 7).

    ρ = exp(lp − lp0) ;  L = max(−A ρ, −A clip(ρ, 1 − ε, 1 + ε_high))
    dual clip (1912.09729): where A < 0, L ← min(L, −c A)

    ε_high defaults to ε (DAPO 2503.14476 raises it). The log-ratio is clamped to
    ±20, so loss and gradient stay finite. Where ρ stands exactly on a bound the
    gradient still flows. weights multiply the loss of each token (`tis_weights`).
    Aggregation as in `masked.aggregate`; token-mean counts valid tokens.
    metrics (sums): approx_kl ½(lp − lp0)², approx_kl_k3 ρ − 1 − log ρ, clip_frac
    [clipped term strictly larger], ratio, tokens; ratio_max is a maximum, 0 if empty.
    Raises ValueError for an unknown aggregation, AssertionError when shapes differ.
    """
    arrays = [logp, logp_old, advantages, mask]
    chex.assert_equal_shape(arrays if weights is None else [*arrays, weights])
    advantages = stop_gradient(_valid(advantages, mask))
    log_ratio = _valid(logp, mask) - stop_gradient(_valid(logp_old, mask))
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio = jnp.exp(log_ratio)

    bounds = (1.0 - eps, 1.0 + (eps if eps_high is None else eps_high))
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, *bounds)
    # `where`, not `maximum`: a tie must send the whole gradient through one branch.
    was_clipped = clipped > unclipped
    loss = jnp.where(was_clipped, clipped, unclipped)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        loss = jnp.where((advantages < 0) & (loss > ceiling), ceiling, loss)
    if weights is not None:
        loss = loss * stop_gradient(_valid(weights, mask))

    total, count = aggregate(loss, mask, mode=aggregation, length=length)
    metrics = _sums(
        mask,
        approx_kl=0.5 * jnp.square(log_ratio),
        approx_kl_k3=_exceeds(log_ratio),
        clip_frac=was_clipped,
        ratio=ratio,
    )
    metrics["ratio_max"] = jnp.max(stop_gradient(ratio), where=mask, initial=0.0)
    return total, count, metrics


def value_loss(
    values: Float[Array, "*b t"],
    values_old: Float[Array, "*b t"],
    returns: Float[Array, "*b t"],
    mask: Bool[Array, "*b t"],
    *,
    eps: Scalar | None = None,
    aggregation: str = "token-mean",
    length: Scalar | None = None,
) -> Loss:
    """Squared error of the critic, with the change of V clipped to ±ε.

    L = ½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)

    eps=None is the plain ½ (V − R)². Aggregation as in `masked.aggregate`.
    metrics (sums): value_clip_frac [clipped term strictly larger], tokens.
    Raises ValueError for an unknown aggregation, AssertionError when shapes differ.
    """
    chex.assert_equal_shape([values, values_old, returns, mask])
    values = _valid(values, mask)
    returns = stop_gradient(_valid(returns, mask))
    loss = jnp.square(values - returns)
    was_clipped = jnp.zeros_like(mask)
    if eps is not None:
        old = stop_gradient(_valid(values_old, mask))
        clipped = jnp.square(jnp.clip(values, old - eps, old + eps) - returns)
        was_clipped = clipped > loss
        loss = jnp.where(was_clipped, clipped, loss)
    total, count = aggregate(0.5 * loss, mask, mode=aggregation, length=length)
    return total, count, _sums(mask, value_clip_frac=was_clipped)


def entropy_bonus(
    entropy: Float[Array, "*b t"],
    mask: Bool[Array, "*b t"],
    *,
    aggregation: str = "token-mean",
    length: Scalar | None = None,
) -> Loss:
    """Entropy S of the policy in nats, as (total, count, metrics).

    The one term that is *subtracted*: loss = L_clip + c₁ L_V − c₂ S.
    metrics (sums): entropy, tokens.
    Raises ValueError for an unknown aggregation, AssertionError when shapes differ.
    """
    chex.assert_equal_shape([entropy, mask])
    total, count = aggregate(entropy, mask, mode=aggregation, length=length)
    return total, count, _sums(mask, entropy=entropy)


def kl_loss(
    logp: Float[Array, "*b t"],
    logp_ref: Float[Array, "*b t"],
    mask: Bool[Array, "*b t"],
    *,
    estimator: str = "k3",
    unbiased_grad: bool = True,
    aggregation: str = "token-mean",
    length: Scalar | None = None,
) -> Loss:
    """KL[π ‖ π_ref] in the loss, to be multiplied by β.

    k1 = lp − lpr ;  k2 = k1²/2 ;  k3 = expm1(−k1) + k1      (as `kl.kl_estimate`)

    A good estimator of a value need not have a good gradient: for samples of π,
    E ∇k1 = 0 and E ∇k3 is not ∇KL, while E ∇k2 = E[k1 ∇lp] is. So the value is the
    estimator's and the gradient k2's. unbiased_grad=False differentiates the
    estimator itself (with k3: GRPO as published, 2402.03300).
    k3 clamps k1 to ±20. No gradient reaches logp_ref. Aggregation as in
    `masked.aggregate`. metrics (sums): kl_loss, tokens.
    Raises ValueError for an unknown name, or for k1 with unbiased_grad=False;
    AssertionError when shapes differ.
    """
    chex.assert_equal_shape([logp, logp_ref, mask])
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3")
    if estimator == "k1" and not unbiased_grad:
        raise ValueError("E ∇k1 = 0: as a loss, k1 needs unbiased_grad=True")
    k1 = _valid(logp, mask) - stop_gradient(_valid(logp_ref, mask))
    k2 = 0.5 * jnp.square(k1)
    k3 = _exceeds(jnp.clip(-k1, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    kl = {"k1": k1, "k2": k2, "k3": k3}[estimator]
    if unbiased_grad:
        kl = stop_gradient(kl) + (k2 - stop_gradient(k2))
    total, count = aggregate(kl, mask, mode=aggregation, length=length)
    return total, count, _sums(mask, kl_loss=kl)


def tis_weights(
    logp_train_old: Float[Array, "*b t"],
    logp_sampler: Float[Array, "*b t"],
    *,
    cap: Scalar = 2.0,
) -> Float[Array, "*b t"]:
    """Truncated importance weights from the sampler's policy to the trainer's.

    w = min(exp(lp_train_old − lp_sampler), C)

    Both log-probs are of the same params: they differ by the numerics of the
    decoder only. Constants: no gradient. Pass as `weights` to `clip_loss`.
    Raises AssertionError when shapes differ.
    """
    chex.assert_equal_shape([logp_train_old, logp_sampler])
    gap = logp_train_old.astype(jnp.float32) - logp_sampler.astype(jnp.float32)
    weights = jnp.exp(jnp.clip(gap, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    return stop_gradient(jnp.minimum(weights, cap))


def explained_variance(
    values: Float[Array, "*b t"],
    returns: Float[Array, "*b t"],
    mask: Bool[Array, "*b t"],
) -> Float[Array, ""]:
    """Share of the returns' variance that the critic predicts.

    1 − var(R − V)/(var(R) + 1e-8), over the mask: 1 is perfect, 0 no better than a
    constant, negative worse.
    Raises AssertionError when shapes differ.
    """
    chex.assert_equal_shape([values, returns, mask])
    values, returns = _valid(values, mask), _valid(returns, mask)
    residual = masked_var(returns - values, mask)
    return 1.0 - residual / (masked_var(returns, mask) + 1e-8)


def bradley_terry(
    chosen: Float[Array, "*b"],
    rejected: Float[Array, "*b"],
    margin: Scalar | Float[Array, "*b"] = 0.0,
) -> Float[Array, "*b"]:
    """Negative log-likelihood of each preference, −log σ(chosen − rejected − margin).

    Scores of the two responses of each pair; the margin (Llama 2, 2307.09288) may
    be one a pair. Float32, one loss a pair.
    Raises AssertionError when shapes differ.
    """
    chex.assert_equal_shape([chosen, rejected])
    gap = chosen.astype(jnp.float32) - rejected.astype(jnp.float32) - margin
    return -jax.nn.log_sigmoid(gap)


def dpo_loss(
    logp_chosen: Float[Array, "*b"],
    logp_rejected: Float[Array, "*b"],
    ref_chosen: Float[Array, "*b"],
    ref_rejected: Float[Array, "*b"],
    *,
    beta: Scalar = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Float[Array, "*b"]:
    """Direct preference optimisation, one loss a pair, float32.

        h = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)
        sigmoid   −(1 − ε) log σ(β h) − ε log σ(−β h)      arXiv 2305.18290, ε: cDPO
        ipo       (h − 1 / 2β)²                            arXiv 2310.12036

    Log-probs of whole responses, summed over tokens (for IPO their mean is usual).
    Raises ValueError for an unknown kind or a smoothing outside [0, ½),
    AssertionError when shapes differ.
    """
    chex.assert_equal_shape([logp_chosen, logp_rejected, ref_chosen, ref_rejected])
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5); got {label_smoothing}")
    h = (logp_chosen - ref_chosen) - (logp_rejected - ref_rejected)
    h = h.astype(jnp.float32)
    if kind == "ipo":
        return jnp.square(h - 1 / (2 * beta))
    if kind != "sigmoid":
        raise ValueError(f"unknown DPO loss {kind!r}; known: sigmoid, ipo")
    right, wrong = jax.nn.log_sigmoid(beta * h), jax.nn.log_sigmoid(-beta * h)
    return -(1 - label_smoothing) * right - label_smoothing * wrong
