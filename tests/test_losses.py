"""The losses: goldens of the clipped objective, gradients zero where they must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.losses import (
    bradley_terry,
    clip_loss,
    entropy_bonus,
    explained_variance,
    kl_loss,
    tis_weights,
    value_loss,
)
from jppo.masked import whiten

RHO = np.array([0.5, 1.0, 1.3, 4.0, 0.5, 1.3])
A6 = jnp.array([1.0, -1.0, 2.0, -2.0, -1.0, -1.0])
LOGP = jnp.log(jnp.array(RHO, jnp.float32))
ZERO, ALL = jnp.zeros(6), jnp.ones(6, bool)
jitted = pytest.mark.parametrize("wrap", [jax.jit], ids=["jit"])


def normal(seed, *shape):
    # numpy: every new shape of jax.random would compile for a second
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(actual, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tol, atol=tol)


def token_losses(**how):
    """Loss and gradient of every token alone, by vmap."""

    def one(logp, advantage):
        m = jnp.ones(1, bool)
        return clip_loss(logp[None], jnp.zeros(1), advantage[None], m, **how)[0]

    return jax.vmap(jax.value_and_grad(one))


one_token = jax.jit(token_losses(eps=0.2))


@jitted
@pytest.mark.parametrize(
    "how, losses, grads",
    [
        ({}, [-0.5, 1, -2.4, 8, 0.8, 1.3], [-0.5, 1, 0, 8, 0, 1.3]),
        ({"dual_clip": 3.0}, [-0.5, 1, -2.4, 6, 0.8, 1.3], [-0.5, 1, 0, 0, 0, 1.3]),
        ({"eps_high": 0.28}, [-0.5, 1, -2.56, 8, 0.8, 1.3], [-0.5, 1, 0, 8, 0, 1.3]),
    ],
    ids=["plain", "dual", "eps_high"],
)
def test_clip_6(wrap, how, losses, grads):
    """clip-6: losses and dL/dlp of six tokens."""
    value, grad = wrap(token_losses(**how))(LOGP, A6)
    close(value, losses)
    close(grad, grads)


@jitted
def test_clip_6_metrics(wrap):
    """clip-6: clip_frac 1/3, and the other sums against float64."""
    total, count, metrics = wrap(clip_loss)(LOGP, ZERO, A6, ALL)
    close(total, -0.5 + 1 - 2.4 + 8 + 0.8 + 1.3)
    assert count == 6 and metrics["tokens"] == 6
    close(metrics["clip_frac"] / count, 1 / 3)
    close(metrics["approx_kl"], (0.5 * np.log(RHO) ** 2).sum())
    close(metrics["approx_kl_k3"], (RHO - 1 - np.log(RHO)).sum())
    close(metrics["ratio"], RHO.sum())
    close(metrics["ratio_max"], 4.0)


@pytest.mark.parametrize(
    "advantage, ratio, objective, flows",
    [(2, 1.0, 2.0, 1), (2, 1.1, 2.2, 1), (2, 1.5, 2.4, 0), (-2, 0.5, -1.6, 0)],
)
def test_seed_clip(advantage, ratio, objective, flows):
    """seed-clip: objective values, before the sign flip."""
    logp, a = jnp.log(jnp.array([ratio])), jnp.array([float(advantage)])
    value, grad = one_token(logp, a)
    close(-value, [objective])
    close(-grad, [advantage * ratio * flows])


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_seed_gradient_table(advantage, ratio):
    """Eight cells: A>0 gradient iff ρ ≤ 1+ε; A<0 gradient iff ρ ≥ 1−ε."""
    _, grad = one_token(jnp.log(jnp.array([ratio])), jnp.array([advantage]))
    flows = ratio <= 1.2 if advantage > 0 else ratio >= 0.8
    close(grad, [-advantage * ratio if flows else 0.0])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_gradient_flows_whole_on_the_bound(advantage):
    """ρ exactly on a bound (here 1 with ε=0) is not clipped, for either sign."""
    _, grad = token_losses(eps=0.0)(jnp.zeros(1), jnp.array([advantage]))
    close(grad, [-advantage], 0)


@jitted
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_overflow(wrap, gap, advantage):
    """overflow: lp−lp0 = ±100 → finite loss and gradient."""
    value, grad = wrap(token_losses())(jnp.array([gap]), jnp.array([advantage]))
    assert jnp.isfinite(value).all() and jnp.isfinite(grad).all()
    if gap > 0 and advantage < 0:
        close(value, [np.exp(20.0)], 1e-5)
    metrics = clip_loss(
        jnp.array([gap]), jnp.zeros(1), jnp.array([advantage]), ALL[:1]
    )[2]
    assert all(jnp.isfinite(m) for m in metrics.values())


@jitted
def test_first_minibatch(wrap):
    """first minibatch: ρ = 1 exactly, approx_kl 0, clip_frac 0, loss −mean A ≈ 0."""
    logp = -5 * jnp.abs(normal(0, 4, 7))
    m = jnp.arange(7) < jnp.array([[7], [3], [1], [0]])
    advantages = whiten(normal(1, 4, 7), m)
    total, count, metrics = wrap(clip_loss)(logp, logp, advantages, m)
    assert metrics["ratio"] == count == 11 and metrics["ratio_max"] == 1.0
    assert metrics["approx_kl"] == metrics["approx_kl_k3"] == 0.0
    assert metrics["clip_frac"] == 0.0
    assert abs(total / count) < 1e-6
    grad = jax.grad(lambda x: clip_loss(x, logp, advantages, m)[0])(logp)
    np.testing.assert_array_equal(grad, -advantages)


@jitted
@pytest.mark.parametrize("poison", [999.0, jnp.nan, -jnp.inf])
def test_masked_gap(wrap, poison):
    """Whatever stands under the mask changes no loss, metric or gradient."""
    m = jnp.array([1, 1, 0, 1, 1, 0], bool)
    bad = lambda x: jnp.where(m, x, poison)  # noqa: E731
    zero = lambda x: jnp.where(m, x, 0.0)  # noqa: E731
    w = jnp.array([1.0, 2.0, 0.5, 1.5, 1.0, 1.0])

    def everything(f):
        def total(x):
            p, _, a = clip_loss(f(x), f(ZERO), f(A6), m, weights=f(w), dual_clip=3.0)
            v, _, b = value_loss(f(x), f(ZERO), f(A6), m, eps=0.2)
            k, _, c = kl_loss(f(x), f(ZERO + 0.1), m)
            e, *_ = entropy_bonus(f(x), m)
            d = {"explained": explained_variance(f(x), f(A6), m)}
            return p + v + k + e, a | b | c | d

        return wrap(jax.value_and_grad(total, has_aux=True))(LOGP)

    jax.tree.map(np.testing.assert_array_equal, everything(bad), everything(zero))
    (value, _), grad = everything(bad)
    assert jnp.isfinite(value) and jnp.all(jnp.where(m, grad != 0, grad == 0)[:2])


def test_empty_mask_is_zero():
    none = ~ALL
    for total, count, metrics in (
        clip_loss(LOGP, ZERO, A6, none),
        value_loss(LOGP, ZERO, A6, none, eps=0.2),
        kl_loss(LOGP, ZERO, none),
    ):
        assert total == count == 0.0
        assert all(v == 0.0 for v in metrics.values())


def test_only_the_current_policy_is_differentiated():
    old = LOGP - 0.05

    def total(logp, logp_old, advantages, weights):
        return clip_loss(logp, logp_old, advantages, ALL, weights=weights)[0]

    grads = jax.grad(total, (0, 1, 2, 3))(LOGP, old, A6, jnp.ones(6))
    assert jnp.all(grads[0] != 0)
    assert all(jnp.all(g == 0) for g in grads[1:])

    def critic(values, values_old, returns):
        return value_loss(values, values_old, returns, ALL, eps=0.5)[0]

    grads = jax.grad(critic, (0, 1, 2))(LOGP, LOGP, A6)
    assert jnp.all(grads[0] != 0)
    assert all(jnp.all(g == 0) for g in grads[1:])
    assert jnp.all(jax.grad(lambda r: kl_loss(LOGP, r, ALL)[0])(old) == 0)
    assert jnp.all(jax.grad(lambda x: tis_weights(x, ZERO).sum())(LOGP) == 0)


def test_weights_multiply_token_losses():
    w = jnp.array([1.0, 0.0, 2.0, 0.5, 1.0, 1.0])
    total, count, _ = clip_loss(LOGP, ZERO, A6, ALL, weights=w)
    close(total, -0.5 + 0 - 4.8 + 4 + 0.8 + 1.3)
    assert count == 6


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", -7 / 4),
        ("seq-mean-token-mean", -1.5),
        ("seq-mean-token-sum", -3.5),
        ("seq-mean-token-sum-norm", -3.5 / 3),
    ],
)
def test_aggregations_reach_every_loss(mode, expected):
    m = jnp.array([[1, 0, 0], [1, 1, 1]], bool)
    a = jnp.array([[1.0, 9.0, 9.0], [2.0, 2.0, 2.0]])
    z, how = jnp.zeros((2, 3)), {"aggregation": mode, "length": 3}
    policy = clip_loss(z, z, a, m, **how)
    values = value_loss(z, z, jnp.sqrt(2 * a), m, **how)
    bonus = entropy_bonus(a, m, **how)
    kl = kl_loss(jnp.sqrt(2 * a), z, m, estimator="k2", **how)
    close(policy[0] / policy[1], expected)
    for total, count, metrics in (values, bonus, kl):
        close(total / count, -expected)
        assert metrics["tokens"] == 4


@jitted
def test_value_loss(wrap):
    """½ max of both squares, by hand: ε .2, V_old 0."""
    v, r = jnp.array([0.1, 0.5, 0.5, -0.5]), jnp.array([1.0, 1.0, 0.0, -0.4])
    z, m = jnp.zeros(4), jnp.ones(4, bool)

    def total(v, eps):
        t, count, metrics = value_loss(v, z, r, m, eps=eps)
        return t, (count, metrics)

    grad = wrap(jax.value_and_grad(total, has_aux=True))
    (value, (count, metrics)), g = grad(v, 0.2)
    close(value, 0.5 * (0.81 + 0.64 + 0.25 + 0.04))
    close(g, [-0.9, 0.0, 0.5, 0.0])
    assert count == 4 and metrics["value_clip_frac"] == 2
    plain = value_loss(v, z, r, m)
    close(plain[0], 0.5 * (0.81 + 0.25 + 0.25 + 0.01))
    assert plain[2]["value_clip_frac"] == 0


def test_value_clip_frac_is_zero_before_the_first_step():
    v = normal(0, 50) * 3
    _, _, metrics = value_loss(v, v, v + 1, jnp.ones(50, bool), eps=0.2)
    assert metrics["value_clip_frac"] == 0


def test_entropy_bonus():
    total, count, metrics = entropy_bonus(jnp.arange(6.0), jnp.arange(6) > 2)
    assert total == metrics["entropy"] == 12.0 and count == 3


@jitted
def test_tis_weights(wrap):
    """w = min(exp(lp_train_old − lp_sampler), C), C = 2 by default."""
    train, sampler = jnp.array([-1.0, -1.0, -1.0]), jnp.array([-0.5, -1.0, -200.0])
    close(wrap(tis_weights)(train, sampler), [np.exp(-0.5), 1.0, 2.0])
    close(tis_weights(train, sampler, cap=5.0)[2], 5.0)


@jitted
def test_explained_variance(wrap):
    f, m = wrap(explained_variance), jnp.array([1, 1, 1, 1, 0], bool)
    r = jnp.array([1.0, 2.0, 3.0, 6.0, jnp.nan])
    v = jnp.array([1.0, 2.5, 2.0, 5.0, 0.0])
    gap, base = np.array([0, -0.5, 1, 1]), np.array([1, 2, 3, 6])
    close(f(v, r, m), 1 - gap.var(ddof=1) / base.var(ddof=1))
    close(f(r, r, m), 1.0)
    close(f(jnp.full(5, 7.0), r, m), 0.0)


@jitted
def test_bradley_terry(wrap):
    c, r = jnp.array([1.0, 0.0, -300.0]), jnp.array([0.0, 0.0, 300.0])
    expected = [np.log1p(np.exp(-1.0)), np.log(2.0), 600.0]
    value, grad = wrap(
        jax.value_and_grad(lambda c: jnp.sum(bradley_terry(c, r)))
    )(c)  # fmt: skip
    close(bradley_terry(c, r), expected)
    close(value, sum(expected))
    close(grad, [-1 / (1 + np.e), -0.5, -1.0])
    close(bradley_terry(c, r, 1.0)[0], np.log(2.0))
    close(bradley_terry(c, r, jnp.array([1.0, -1.0, 0.0]))[1], expected[0])


def test_wrong_shapes_are_refused():
    with pytest.raises((AssertionError, TypeError)):
        clip_loss(LOGP, ZERO, A6[:3], ALL)
    with pytest.raises((AssertionError, TypeError)):
        clip_loss(LOGP, ZERO, A6, ALL, weights=jnp.ones(1))
    with pytest.raises((AssertionError, TypeError)):
        value_loss(LOGP, ZERO, A6[:, None], ALL)
    with pytest.raises(ValueError, match="token-mean"):
        clip_loss(LOGP, ZERO, A6, ALL, aggregation="sum")
