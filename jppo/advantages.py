"""Advantages and returns: how credit moves back along a response.

Time recursions are written for one sequence [t] and batched by `jax.vmap`; the
group baselines (RLOO, GRPO) take the scores of a whole batch. Everything is
float32. A masked position (padding, or a tool's output in the middle of a
response) does not exist for the recursions: the carry passes through it unchanged,
and its own result is 0.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from jppo.masked import Scalar, whiten


def _f32(x: Scalar) -> Float[Array, ""]:
    return jnp.asarray(x, jnp.float32)


def _valid(x: Float[Array, " t"], mask: Bool[Array, " t"]) -> Float[Array, " t"]:
    return jnp.where(mask, x, 0.0).astype(jnp.float32)


def gae_scan(
    rewards: Float[Array, " t"],
    values: Float[Array, " t"],
    mask: Bool[Array, " t"],
    *,
    gamma: Scalar = 1.0,
    lam: Scalar = 0.95,
    last_value: Scalar = 0.0,
    dones: Bool[Array, " t"] | None = None,
) -> tuple[Float[Array, " t"], Float[Array, " t"]]:
    """Generalised advantage estimation for one sequence (1506.02438).

    δ_t = r_t + γ V_{t+1} − V_t ;  A_t = δ_t + γλ A_{t+1} ;  R_t = A_t + V_t

    t + 1 is the next *valid* position: (V', A') pass through a masked gap. After
    the last one stands last_value. Where dones_t is true the episode ends with r_t:
    neither V_{t+1} nor A_{t+1} reaches t. γ and λ may be traced scalars.
    Returns (advantages, returns), float32 [t], 0 at masked positions.
    Raises AssertionError unless all arrays are [t].
    """
    chex.assert_rank([rewards, values, mask], 1)
    chex.assert_equal_shape([rewards, values, mask])
    if dones is None:
        dones = jnp.zeros_like(mask)
    chex.assert_equal_shape([mask, dones])
    rewards, values = _valid(rewards, mask), _valid(values, mask)
    gamma, lam = _f32(gamma), _f32(lam)

    def step(carry, x):
        next_value, next_advantage = carry
        reward, value, valid, done = x
        discount = jnp.where(done, 0.0, gamma)
        delta = reward + discount * next_value - value
        advantage = delta + discount * lam * next_advantage
        carry = (
            jnp.where(valid, value, next_value),
            jnp.where(valid, advantage, next_advantage),
        )
        return carry, jnp.where(valid, advantage, 0.0)

    init = (_f32(last_value), _f32(0.0))
    xs = (rewards, values, mask, dones)
    _, advantages = jax.lax.scan(step, init, xs, reverse=True)
    return advantages, jnp.where(mask, advantages + values, 0.0)


def discounted_returns(
    rewards: Float[Array, " t"],
    mask: Bool[Array, " t"],
    *,
    gamma: Scalar = 1.0,
    last_value: Scalar = 0.0,
) -> Float[Array, " t"]:
    """Discounted return-to-go of one sequence, G_t = r_t + γ G_{t+1}.

    t + 1 is the next valid position, and last_value follows the last one.
    Returns float32 [t], 0 at masked positions.
    Raises AssertionError unless both arrays are [t].
    """
    chex.assert_rank([rewards, mask], 1)
    chex.assert_equal_shape([rewards, mask])
    gamma = _f32(gamma)

    def step(future, x):
        reward, valid = x
        now = reward + gamma * future
        return jnp.where(valid, now, future), jnp.where(valid, now, 0.0)

    xs = (_valid(rewards, mask), mask)
    _, returns = jax.lax.scan(step, _f32(last_value), xs, reverse=True)
    return returns


def nstep_returns(
    rewards: Float[Array, " t"],
    values: Float[Array, " t"],
    mask: Bool[Array, " t"],
    *,
    n: int,
    gamma: Scalar = 1.0,
    last_value: Scalar = 0.0,
) -> Float[Array, " t"]:
    """n-step returns of one sequence.

    G⁽ⁿ⁾_t = Σ_{k<n} γᵏ r_{t+k} + γⁿ V_{t+n},  cut at the end, where last_value stands

    n=1 is the target of λ=0, n ≥ t that of λ=1. Steps count valid positions.
    Returns float32 [t], 0 at masked positions.
    Raises ValueError when n < 1, AssertionError unless all arrays are [t].
    """
    if n < 1:
        raise ValueError(f"n-step returns need n >= 1; got {n}")
    chex.assert_rank([rewards, values, mask], 1)
    chex.assert_equal_shape([rewards, values, mask])
    gamma = _f32(gamma)

    # The carry holds G⁽⁰⁾ … G⁽ⁿ⁻¹⁾ of the next position, with G⁽⁰⁾ = V.
    def step(future, x):
        reward, value, valid = x
        now = reward + gamma * future
        carry = jnp.concatenate([value[None], now[:-1]])
        return jnp.where(valid, carry, future), jnp.where(valid, now[-1], 0.0)

    xs = (_valid(rewards, mask), _valid(values, mask), mask)
    init = jnp.broadcast_to(_f32(last_value), (n,))
    _, returns = jax.lax.scan(step, init, xs, reverse=True)
    return returns


def _centred(scores: Float[Array, " b"], group_size: int) -> Float[Array, "n g"]:
    """r − mean_g of each group."""
    chex.assert_rank(scores, 1)
    if group_size < 2:
        raise ValueError(f"a group needs at least 2 scores; got {group_size=}")
    if scores.shape[0] % group_size:
        raise ValueError(
            f"{scores.shape[0]} scores do not divide into groups of {group_size}"
        )
    groups = scores.astype(jnp.float32).reshape(-1, group_size)
    # From the first score: equal scores centre to exactly 0, which rounding of their
    # mean would not, and a standard deviation of about 0 would blow that up.
    groups = groups - groups[:, :1]
    return groups - jnp.mean(groups, axis=1, keepdims=True)


def rloo_advantages(
    scores: Float[Array, " b"], *, group_size: int
) -> Float[Array, " b"]:
    """Leave-one-out baseline within each group (RLOO, 2402.14740).

    A_i = r_i − mean_{j≠i} r_j = (g r_i − Σ_j r_j) / (g − 1)

    scores [b]: one a sequence, the g samples of a prompt contiguous.
    Raises ValueError when group_size < 2 or does not divide b.
    """
    centred = _centred(scores, group_size)
    return (centred * (group_size / (group_size - 1))).reshape(-1)


def grpo_advantages(
    scores: Float[Array, " b"], *, group_size: int, scale_by_std: bool = True
) -> Float[Array, " b"]:
    """Scores standardised within each group (GRPO, 2402.03300).

    A = (r − mean_g) / (std_g + 1e-6), std with ddof=1

    scale_by_std=False is Dr. GRPO (2503.20783): A = r − mean_g. A group of equal
    scores has advantage 0.
    scores [b]: one a sequence, the g samples of a prompt contiguous.
    Raises ValueError when group_size < 2 or does not divide b.
    """
    centred = _centred(scores, group_size)
    if scale_by_std:
        variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True)
        centred /= jnp.sqrt(variance / (group_size - 1)) + 1e-6
    return centred.reshape(-1)


def reinforce_pp_advantages(
    rewards: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    gamma: Scalar = 1.0,
    ddof: int = 1,
) -> Float[Array, "b t"]:
    """REINFORCE++: the return-to-go, whitened over the whole batch (2501.03262).

    A = whiten(G),  G_t = r_t + γ G_{t+1}

    rewards [b t] carry the KL penalty already (`kl_penalty`). 0 under the mask.
    Raises AssertionError unless both arrays are [b t].
    """
    chex.assert_rank([rewards, mask], 2)
    chex.assert_equal_shape([rewards, mask])
    returns = jax.vmap(lambda r, m: discounted_returns(r, m, gamma=gamma))(
        rewards, mask
    )
    return whiten(returns, mask, ddof=ddof)


def length_adaptive_lam(
    lengths: Real[Array, "*b"], *, alpha: Scalar = 0.05
) -> Float[Array, "*b"]:
    """λ of the policy by response length (VAPO, 2504.05118).

    λ = clip(1 − 1/(α · length), 0, 1)

    lengths in tokens. Use as the λ of `gae_scan` under vmap; the critic's is 1.
    A length of 0 gives 0.
    """
    scaled = jnp.maximum(alpha * lengths.astype(jnp.float32), 1e-6)
    return jnp.clip(1.0 - 1.0 / scaled, 0.0, 1.0)
