"""Advantages: the hand-derived goldens, gaps, episode ends, group baselines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.advantages import (
    discounted_returns,
    gae_scan,
    grpo_advantages,
    length_adaptive_lam,
    nstep_returns,
    reinforce_pp_advantages,
    rloo_advantages,
)
from jppo.kl import kl_penalty, score_mask

R = jnp.array([0.0, 0.0, 0.0, 1.0])
V = jnp.array([0.5, 0.6, 0.7, 0.8])
ALL = jnp.ones(4, bool)
jitted = pytest.mark.parametrize("wrap", [jax.jit], ids=["jit"])


def close(actual, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tol, atol=tol)


def gae(**how):
    return lambda r, v, m: gae_scan(r, v, m, **how)


@jitted
def test_gae_1(wrap):
    """GAE-1: A [.456725,.3755,.29,.2], R [.956725,.9755,.99,1]."""
    advantages, returns = wrap(gae(gamma=1.0, lam=0.95))(R, V, ALL)
    close(advantages, [0.456725, 0.3755, 0.29, 0.2])
    close(returns, [0.956725, 0.9755, 0.99, 1.0])
    assert advantages.dtype == returns.dtype == jnp.float32


@jitted
def test_gae_2(wrap):
    """GAE-2: the same with γ .99."""
    advantages, _ = wrap(gae(gamma=0.99, lam=0.95))(R, V, ALL)
    close(advantages, [0.42922622, 0.35643405, 0.2801, 0.2])


def test_gae_defaults_are_those_of_language():
    close(gae_scan(R, V, ALL)[0], [0.456725, 0.3755, 0.29, 0.2])


def test_gae_vmap_and_traced_coefficients():
    """GAE-1 and GAE-2 in one batch, γ a traced number a row."""
    gamma = jnp.array([1.0, 0.99])
    f = lambda g: gae_scan(R, V, ALL, gamma=g, lam=jnp.float32(0.95))[0]  # noqa: E731
    advantages = jax.jit(jax.vmap(f))(gamma)
    close(advantages[0], [0.456725, 0.3755, 0.29, 0.2])
    close(advantages[1], [0.42922622, 0.35643405, 0.2801, 0.2])


@jitted
@pytest.mark.parametrize("poison", [999.0, jnp.nan, jnp.inf])
def test_gae_gap(wrap, poison):
    """GAE-gap: m [1,1,0,1,1]; whatever the gap holds, A and its gradient ignore it."""
    m = jnp.array([1, 1, 0, 1, 1], bool)
    v = jnp.array([0.1, 0.2, poison, 0.4, 0.5])
    r = jnp.array([0.0, 0.0, poison, 0.0, 1.0])
    advantages, returns = wrap(gae(gamma=0.99, lam=0.95))(r, v, m)
    close(advantages, [0.78232438, 0.72761762, 0.0, 0.56525, 0.5])
    close(returns, [0.88232438, 0.92761762, 0.0, 0.96525, 1.0])
    # ∂A_0/∂V_1 = γ − γλ and ∂A_0/∂r_last = (γλ)³: three valid steps, not four.
    grad = jax.grad(lambda r, v: gae(gamma=0.99)(r, v, m)[0][0], (0, 1))
    grad_r, grad_v = wrap(grad)(r, v)
    close(grad_r, np.where(m, (0.99 * 0.95) ** np.array([0, 1, 0, 2, 3]), 0))
    close(grad_v[:3], [-1.0, 0.99 - 0.99 * 0.95, 0.0])


def test_gae_padding_on_either_side():
    pad = jnp.full((2,), jnp.nan)
    out = jnp.zeros(2, bool)
    left = gae_scan(*(jnp.concatenate(x) for x in [(pad, R), (pad, V), (out, ALL)]))
    right = gae_scan(*(jnp.concatenate(x) for x in [(R, pad), (V, pad), (ALL, out)]))
    close(left[0], [0, 0, 0.456725, 0.3755, 0.29, 0.2])
    close(right[0], [0.456725, 0.3755, 0.29, 0.2, 0, 0])
    close(right[1], [0.956725, 0.9755, 0.99, 1.0, 0, 0])


def test_gae_of_nothing_is_nothing():
    advantages, returns = gae_scan(R, V, ~ALL, last_value=3.0)
    close(advantages, np.zeros(4))
    close(returns, np.zeros(4))


def test_gae_last_value_and_dones():
    """Two episodes of control in one sequence; the second is cut and bootstrapped."""
    r, v = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 0.6, 0.7, 0.8])
    g, lam, last = 0.9, 0.8, 5.0
    a3 = 4.0 + g * last - 0.8
    a2 = 3.0 + g * 0.8 - 0.7 + g * lam * a3
    a1 = 2.0 - 0.6
    a0 = 1.0 + g * 0.6 - 0.5 + g * lam * a1
    dones = jnp.array([False, True, False, False])
    advantages, returns = gae_scan(
        jnp.array(r, jnp.float32), jnp.array(v, jnp.float32), ALL,
        gamma=g, lam=lam, last_value=last, dones=dones,
    )  # fmt: skip
    close(advantages, [a0, a1, a2, a3])
    close(returns, np.array([a0, a1, a2, a3]) + v)


@jitted
def test_seed_rlhf(wrap):
    """seed-rlhf: r (−.02,.06,.66), Σr .70, δ (.03,.11,.01), A (.15,.12,.01)."""
    gap = jnp.array([[0.10, -0.30, 0.70]])
    logp_ref = jnp.array([[-1.0, -2.0, -1.5]])
    v, m = jnp.array([0.55, 0.60, 0.65]), jnp.ones((1, 3), bool)
    penalty = lambda lp, ref, s: kl_penalty(lp, ref, s, m, beta=0.2)  # noqa: E731
    r = wrap(penalty)(logp_ref + gap, logp_ref, jnp.array([0.8]))
    close(r, [[-0.02, 0.06, 0.66]])
    close(r.sum(), 0.70)
    close(wrap(gae(gamma=1.0, lam=0.0))(r[0], v, m[0])[0], [0.03, 0.11, 0.01])
    close(wrap(gae(gamma=1.0, lam=1.0))(r[0], v, m[0])[0], [0.15, 0.12, 0.01])


@jitted
@pytest.mark.parametrize(
    "score_at, rewards, expected",
    [
        ("last", [-0.005, -0.01, 1.005, 0, 0], [0.8167625, 0.75975, 0.705]),
        ("after_eos", [-0.005, -0.01, 0.005, 1, 0], [0.7896875, 0.73125, 0.675]),
    ],
)
def test_score_at(wrap, score_at, rewards, expected):
    """score-at: [t0,t1,EOS,PAD,PAD]; after_eos runs GAE over one slot more."""
    m = jnp.array([[1, 1, 1, 0, 0]], bool)
    logp = jnp.array([[0.1, 0.2, -0.1, 7.0, 7.0]]) - 3.0
    v = jnp.array([0.1, 0.2, 0.3, 0.4, 0.5])

    def run(logp, v):
        ref = jnp.full((1, 5), -3.0)
        r = kl_penalty(logp, ref, jnp.ones(1), m, beta=0.05, score_at=score_at)
        return r, gae_scan(r[0], v, score_mask(m, score_at=score_at)[0])[0]

    r, advantages = wrap(run)(logp, v)
    close(r, [rewards])
    close(advantages[:3], expected)


@jitted
def test_discounted_returns(wrap):
    r = jnp.array([1.0, jnp.nan, 2.0, 4.0])
    m = jnp.array([1, 0, 1, 1], bool)
    f = lambda r, m: discounted_returns(r, m, gamma=0.5, last_value=8.0)  # noqa: E731
    close(wrap(f)(r, m), [1 + 0.5 * 6, 0, 2 + 0.5 * 8, 4 + 0.5 * 8])


def test_nstep_returns():
    r, v = jnp.array([1.0, 2.0, 4.0]), jnp.array([10.0, 20.0, 40.0])
    m = jnp.ones(3, bool)
    f = lambda n: nstep_returns(r, v, m, n=n, gamma=0.5, last_value=80.0)  # noqa: E731
    close(f(1), [1 + 10, 2 + 20, 4 + 40])
    close(f(2), [1 + 1 + 10, 2 + 2 + 20, 4 + 40])
    close(f(3), [1 + 1 + 1 + 10, 2 + 2 + 20, 4 + 40])
    with pytest.raises(ValueError, match="n >= 1"):
        f(0)


def test_nstep_returns_skip_gaps():
    m = jnp.array([1, 0, 1, 1], bool)
    r, v = jnp.array([1.0, 999, 2.0, 4.0]), jnp.array([10.0, jnp.nan, 20.0, 40.0])
    close(nstep_returns(r, v, m, n=2), [1 + 2 + 40, 0, 2 + 4, 4])


@jitted
def test_groups(wrap):
    """groups: r [1,0,0,1] → GRPO ±.8660239, Dr ±.5, RLOO ±.66666667."""
    r = jnp.array([1.0, 0.0, 0.0, 1.0])
    sign = np.array([1, -1, -1, 1])
    grpo = wrap(lambda r: grpo_advantages(r, group_size=4))
    close(grpo(r), 0.8660239 * sign)
    dr = wrap(lambda r: grpo_advantages(r, group_size=4, scale_by_std=False))
    close(dr(r), 0.5 * sign)
    rloo = wrap(lambda r: rloo_advantages(r, group_size=4))
    close(rloo(r), 0.66666667 * sign)


def test_groups_are_contiguous():
    r = jnp.array([1.0, 3.0, 10.0, 20.0])
    close(rloo_advantages(r, group_size=2), [-2, 2, -10, 10])
    close(grpo_advantages(r, group_size=2, scale_by_std=False), [-1, 1, -5, 5])


def test_groups_of_equal_scores_are_exactly_zero():
    """Rounding of the mean must not be blown up by the division by std ≈ 0."""
    r = jnp.full((7,), 5.1)
    np.testing.assert_array_equal(grpo_advantages(r, group_size=7), np.zeros(7))
    np.testing.assert_array_equal(rloo_advantages(r, group_size=7), np.zeros(7))


@pytest.mark.parametrize("f", [rloo_advantages, grpo_advantages])
@pytest.mark.parametrize("size, says", [(3, "groups of 3"), (1, "at least 2")])
def test_groups_refuse_a_wrong_size(f, size, says):
    with pytest.raises(ValueError, match=says):
        f(jnp.zeros(4), group_size=size)


def test_seed_baseline():
    """seed-baseline: u·R has mean .5, variance 100; with baseline 10, .5 and 0."""
    score, returns = np.array([1.0, -1.0]), jnp.array([10.5, 9.5])
    plain = score * np.asarray(returns)
    based = score * np.asarray(
        grpo_advantages(returns, group_size=2, scale_by_std=False)
    )
    close([plain.mean(), plain.var()], [0.5, 100.0])
    close([based.mean(), based.var()], [0.5, 0.0])


def test_reinforce_pp():
    r = np.array([[0.0, 0.0, 2.0, 9.0], [1.0, 0.0, 0.0, -1.0]])
    m = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    g = np.array([[0.5, 1.0, 2.0], [1 - 0.125, -0.25, -0.5]], np.float64)
    valid = np.concatenate([g[0], g[1], [-1.0]])
    whitened = (valid - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8)
    out = reinforce_pp_advantages(jnp.array(r, jnp.float32), jnp.array(m), gamma=0.5)
    close(np.asarray(out)[m], whitened)
    assert out[0, 3] == 0.0


def test_length_adaptive_lam():
    lam = length_adaptive_lam(jnp.array([0, 10, 20, 40, 200]), alpha=0.05)
    close(lam, [0, 0, 0, 0.5, 0.9])
    close(length_adaptive_lam(jnp.array([10.0]), alpha=0.2), [0.5])


def test_length_adaptive_lam_feeds_gae():
    lam = length_adaptive_lam(jnp.array([4, 4000]), alpha=1.0)
    f = jax.vmap(lambda lam: gae_scan(R, V, ALL, lam=lam)[0][0])
    td = [0.1, 0.1, 0.1, 0.2]
    expected = [sum(d * w**k for k, d in enumerate(td)) for w in (0.75, 1 - 1 / 4000)]
    close(f(lam), expected)


def test_wrong_shapes_are_refused():
    with pytest.raises((AssertionError, TypeError)):
        gae_scan(R[None], V[None], ALL[None])
    with pytest.raises((AssertionError, TypeError)):
        gae_scan(R, V[:3], ALL)
    with pytest.raises((AssertionError, TypeError)):
        discounted_returns(R, ALL[:3])
