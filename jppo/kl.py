"""The leash to the reference policy: estimators, shaped rewards, controllers of β.

The KL enters a run in one of two places: in the reward (`kl_penalty`, the default
of RLHF with PPO) or in the loss (`losses.kl_loss`, as GRPO does). Estimators are
per token and float32. Scores are one a sequence, and `place_scores` says on which
token they land. Controllers are pure: state → state.
"""

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from jppo.masked import LOG_RATIO_MAX, Scalar

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(
    logp: Float[Array, "*b t"],
    logp_ref: Float[Array, "*b t"],
    *,
    estimator: str = "k1",
) -> Float[Array, "*b t"]:
    """KL[π ‖ π_ref] estimated from the log-probs of the sampled tokens, in nats.

    k1 = lp − lpr ;  k2 = k1²/2 ;  k3 = expm1(−k1) + k1

    k1 and k3 are unbiased under samples of π, k2 is not; k2 and k3 are never
    negative (http://joschu.net/blog/kl-approx.html). k3 clamps k1 to ±20, so it is
    finite with a finite gradient.
    Raises ValueError for an unknown estimator, AssertionError when shapes differ.
    """
    chex.assert_equal_shape([logp, logp_ref])
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {ESTIMATORS}")
    k1 = logp.astype(jnp.float32) - logp_ref.astype(jnp.float32)
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return 0.5 * jnp.square(k1)
    k1 = jnp.clip(k1, -LOG_RATIO_MAX, LOG_RATIO_MAX)
    return jnp.expm1(-k1) + k1


def full_kl(
    logits: Float[Array, "*b t v"],
    logits_ref: Float[Array, "*b t v"],
    *,
    temperature: Scalar = 1.0,
) -> Float[Array, "*b t"]:
    """Exact KL over the vocabulary, Σ_v π(v) (log π(v) − log π_ref(v)), in nats.

    One temperature divides both logits. Equal logits give exactly 0. A token with
    π(v) = 0 adds 0.
    Raises AssertionError when shapes differ.
    """
    chex.assert_equal_shape([logits, logits_ref])
    logp = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    logp_ref = jax.nn.log_softmax(logits_ref.astype(jnp.float32) / temperature)
    seen = logp > -jnp.inf
    gap = jnp.where(seen, logp, 0.0) - jnp.where(seen, logp_ref, 0.0)
    return jnp.sum(jnp.exp(logp) * gap, axis=-1)


def _score_slots(mask: Bool[Array, "b t"], score_at: str) -> Bool[Array, "b t"]:
    """True at the one slot of each row that receives the score; none if empty."""
    chex.assert_rank(mask, 2)
    if score_at not in ("last", "after_eos"):
        raise ValueError(f"unknown score_at {score_at!r}; known: last, after_eos")
    t = mask.shape[1]
    slot = t - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    if score_at == "after_eos":
        slot = jnp.minimum(slot + 1, t - 1)
    return (jnp.arange(t) == slot[:, None]) & mask.any(axis=1, keepdims=True)


def score_mask(
    mask: Bool[Array, "b t"], *, score_at: str = "last"
) -> Bool[Array, "b t"]:
    """The positions over which GAE runs: mask, plus the slot of the score.

    With score_at="last" this is mask itself. With "after_eos" it gains the slot
    after the last valid token (if there is one), whose value is a real prediction:
    pass it to `gae_scan`, and mask itself to the losses and to whitening.
    Raises ValueError for an unknown score_at, AssertionError unless mask is [b t].
    """
    return mask | _score_slots(mask, score_at)


def place_scores(
    scores: Real[Array, " b"], mask: Bool[Array, "b t"], *, score_at: str = "last"
) -> Float[Array, "b t"]:
    """One score a sequence, on one token: r_t = 1[t = last valid] · score.

    score_at="last" is the last valid token, which includes the stop token.
    "after_eos" is the slot after it, or the last slot of the row where there is
    none (N+ 2403.17031, TRL); run GAE over `score_mask` then. A row without a valid
    token gets no score. Float32.
    Raises ValueError for an unknown score_at, AssertionError on ranks.
    """
    chex.assert_rank([scores, mask], [1, 2])
    chex.assert_equal_shape_prefix([scores, mask], 1)
    slots = _score_slots(mask, score_at)
    return jnp.where(slots, scores.astype(jnp.float32)[:, None], 0.0)


def kl_penalty(
    logp: Float[Array, "b t"],
    logp_ref: Float[Array, "b t"],
    scores: Real[Array, " b"],
    mask: Bool[Array, "b t"],
    *,
    beta: Scalar,
    estimator: str = "k1",
    score_at: str = "last",
) -> Float[Array, "b t"]:
    """Rewards of RLHF: r_t = −β k_t + 1[t = last valid] · score (1909.08593).

    scores [b]; everything else [b t]. Rewards are float32 and 0 under the mask,
    except for the slot that `score_at="after_eos"` adds (see `place_scores`).
    Raises ValueError for an unknown estimator or score_at, AssertionError on shapes.
    """
    chex.assert_rank(mask, 2)
    chex.assert_equal_shape([logp, logp_ref, mask])
    kl = kl_estimate(logp, logp_ref, estimator=estimator)
    penalty = jnp.where(mask, -beta * kl, 0.0)
    return penalty + place_scores(scores, mask, score_at=score_at)


def missing_eos(
    scores: Float[Array, " b"],
    stopped: Bool[Array, " b"],
    *,
    penalty: Scalar,
    mode: str = "replace",
) -> Float[Array, " b"]:
    """Scores of responses that never reached a stop token.

    replace:   stopped ? score : penalty              (N+ 2403.17031, Tülu 3)
    subtract:  stopped ? score : score − penalty      (TRL)

    So a punishing penalty is negative for replace and positive for subtract.
    Raises ValueError for an unknown mode, AssertionError when shapes differ.
    """
    chex.assert_rank([scores, stopped], 1)
    chex.assert_equal_shape([scores, stopped])
    scores = scores.astype(jnp.float32)
    if mode == "replace":
        return jnp.where(stopped, scores, penalty)
    if mode == "subtract":
        return jnp.where(stopped, scores, scores - penalty)
    raise ValueError(f"unknown missing-eos mode {mode!r}; known: replace, subtract")


def overlong_penalty(
    lengths: Real[Array, "*b"], *, max_length: Scalar, buffer: Scalar
) -> Float[Array, "*b"]:
    """Soft penalty on long responses, added to the score (DAPO, 2503.14476).

    min(−(length − (max − buffer))/buffer, 0): 0 up to max − buffer, −1 at max.

    Lengths in tokens.
    """
    over = lengths.astype(jnp.float32) - (max_length - buffer)
    return jnp.minimum(-over / buffer, 0.0)


@flax.struct.dataclass
class KLState:
    """What a controller of β carries from one iteration to the next."""

    beta: Float[Array, "..."]  # a scalar; axes in front only when states are stacked

    @classmethod
    def create(cls, beta: Scalar) -> "KLState":
        """The state at the start of a run."""
        return cls(beta=jnp.asarray(beta, jnp.float32))


def fixed_kl(state: KLState, kl: Scalar) -> KLState:
    """β stays as it is, whatever the KL."""
    del kl
    return state


def adaptive_kl(
    state: KLState, kl: Scalar, n: Scalar, *, target: Scalar, horizon: Scalar
) -> KLState:
    """Proportional control of log β (Ziegler et al., 1909.08593).

    β ← β (1 + clip(KL/target − 1, ±.2) · n/horizon)

    kl and target: nats, summed over tokens and averaged over sequences. n and
    horizon: episodes (n of this batch).
    """
    error = jnp.clip(jnp.asarray(kl, jnp.float32) / target - 1.0, -0.2, 0.2)
    return dataclasses.replace(state, beta=state.beta * (1.0 + error * n / horizon))


def paper_kl(state: KLState, kl: Scalar, *, target: Scalar) -> KLState:
    """The rule of the PPO paper (1707.06347, §4), once an update.

    KL > 1.5 target → β·2 ;  KL < target/1.5 → β/2 ;  otherwise unchanged

    kl and target in the same unit.
    """
    kl = jnp.asarray(kl, jnp.float32)
    factor = jnp.where(kl > 1.5 * target, 2.0, jnp.where(kl < target / 1.5, 0.5, 1.0))
    return dataclasses.replace(state, beta=state.beta * factor)
