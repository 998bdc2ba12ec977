"""The KL: estimators, where the score lands, controllers of β."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.kl import (
    KLState,
    adaptive_kl,
    fixed_kl,
    full_kl,
    kl_estimate,
    kl_penalty,
    missing_eos,
    overlong_penalty,
    paper_kl,
    place_scores,
    score_mask,
)
from jppo.losses import kl_loss

jitted = pytest.mark.parametrize("wrap", [jax.jit], ids=["jit"])


def normal(seed, *shape):
    # numpy: every new shape of jax.random would compile for a second
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(actual, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tol, atol=tol)


@jitted
@pytest.mark.parametrize(
    "estimator, expected",
    [("k1", [0.5, -0.5]), ("k2", [0.125, 0.125]), ("k3", [0.10653066, 0.14872127])],
)
def test_kl(wrap, estimator, expected):
    """KL: lp −1, ref −1.5 and the reverse."""
    f = wrap(lambda a, b: kl_estimate(a, b, estimator=estimator))
    close(f(jnp.array([-1.0, -1.5]), jnp.array([-1.5, -1.0])), expected)


def test_kl_default_is_k1_and_unknown_names_the_known():
    close(kl_estimate(jnp.array([-1.0]), jnp.array([-3.0])), [2.0])
    with pytest.raises(ValueError, match="k1.*k2.*k3"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), estimator="k4")


@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_kl_k3_overflow(gap):
    """The log-ratio is clamped to ±20: finite, and so is the gradient."""
    f = lambda lp: kl_estimate(lp, jnp.zeros(1), estimator="k3")[0]  # noqa: E731
    value, grad = jax.value_and_grad(f)(jnp.array([gap]))
    assert jnp.isfinite(value) and jnp.isfinite(grad).all()
    clamped = np.clip(gap, -20, 20)
    close(value, np.expm1(-clamped) + clamped)


@jitted
def test_kl_expect(wrap):
    """KL-expect: KL = E k1 = E k3 = 1.15042077, E k2 = 1.51054306."""
    a, b = jnp.array([[2.0, 1.0, 0.0]]), jnp.array([[0.0, 1.0, 2.0]])
    p, q = jax.nn.log_softmax(a)[0], jax.nn.log_softmax(b)[0]
    close(wrap(full_kl)(a, b), [1.15042077])
    expect = {
        k: jnp.sum(jnp.exp(p) * kl_estimate(p, q, estimator=k))
        for k in ("k1", "k2", "k3")
    }
    close(expect["k1"], 1.15042077)
    close(expect["k3"], 1.15042077)
    close(expect["k2"], 1.51054306)


def test_full_kl_temperature_and_direction():
    a, b = np.array([[2.0, 1.0, -1.0]]), np.array([[0.0, 1.5, 2.0]])

    def expected(t):
        p, q = (np.exp(x / t) / np.exp(x / t).sum() for x in (a, b))
        return (p * np.log(p / q)).sum(-1)

    a32, b32 = jnp.array(a, jnp.float32), jnp.array(b, jnp.float32)
    for t in (1.0, 0.7):
        close(full_kl(a32, b32, temperature=t), expected(t))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3])
def test_identical_params_have_kl_exactly_zero(temperature):
    x = normal(0, 4, 5, 33) * 7
    kl = full_kl(x, x, temperature=temperature)
    assert jnp.all(kl == 0.0)


def test_full_kl_with_impossible_tokens():
    x = jnp.array([[0.0, 1.0, -jnp.inf]])
    y = jnp.array([[1.0, 0.0, 0.0]])
    p = np.array([1, np.e]) / (1 + np.e)
    q = np.array([np.e, 1]) / (2 + np.e)
    f = lambda x: full_kl(x, y)[0]  # noqa: E731
    value, grad = jax.value_and_grad(f)(x)
    close(value, (p * np.log(p / q)).sum())
    assert jnp.isfinite(grad).all()


def test_place_scores():
    """On the last valid token, gaps or not; an empty row gets nothing."""
    m = jnp.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    s = jnp.array([0.7, -2.0, 3.0, 5.0])
    last = [[0, 0.7, 0, 0], [0, 0, -2, 0], [0, 0, 0, 3], [0] * 4]
    after = [[0, 0, 0.7, 0], [0, 0, 0, -2], [0, 0, 0, 3], [0] * 4]
    close(place_scores(s, m), last)
    close(place_scores(s, m, score_at="after_eos"), after)
    with pytest.raises(ValueError, match="after_eos"):
        place_scores(s, m, score_at="first")


def test_place_scores_are_float_even_from_int_scores():
    placed = place_scores(jnp.array([3]), jnp.ones((1, 2), bool))
    assert placed.dtype == jnp.float32
    close(placed, [[0, 3]])


def test_place_scores_of_empty_rows_may_be_nan():
    m = jnp.array([[True, False], [False, False]])
    close(place_scores(jnp.array([1.0, jnp.nan]), m), [[1, 0], [0, 0]])


def test_score_mask():
    m = jnp.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(score_mask(m), m)
    after = [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(score_mask(m, score_at="after_eos"), after)


@jitted
@pytest.mark.parametrize("poison", [999.0, jnp.nan])
def test_kl_penalty_under_the_mask(wrap, poison):
    logp = jnp.array([[-1.0, poison, -2.0, poison]])
    ref = jnp.array([[-1.5, -3.0, -1.0, poison]])
    m = jnp.array([[1, 0, 1, 0]], bool)

    def total(logp, beta):
        r = kl_penalty(logp, ref, jnp.array([2.0]), m, beta=beta)
        return r.sum(), r

    (_, r), grad = wrap(jax.value_and_grad(total, has_aux=True))(logp, 0.1)
    close(r, [[-0.05, 0, 2 + 0.1, 0]])
    close(grad, [[-0.1, 0, -0.1, 0]])


def test_kl_penalty_estimator():
    logp, ref = jnp.array([[-1.0]]), jnp.array([[-1.5]])
    m, s = jnp.ones((1, 1), bool), jnp.zeros(1)
    r = kl_penalty(logp, ref, s, m, beta=2.0, estimator="k3")
    close(r, [[-2 * 0.10653066]])


def test_kl_penalty_without_beta_is_the_score():
    """β=0 → reward = score at the last token."""
    logp = normal(0, 2, 3)
    m = jnp.array([[1, 1, 0], [1, 1, 1]], bool)
    r = kl_penalty(logp, -logp, jnp.array([5.0, 6.0]), m, beta=0.0)
    np.testing.assert_array_equal(r, [[0, 5, 0], [0, 0, 6]])


@jitted
@pytest.mark.parametrize(
    "mode, penalty, expected",
    [("replace", -1.0, [0.5, -1, -1]), ("subtract", 1.0, [0.5, 1, -4])],
)
def test_missing_eos(wrap, mode, penalty, expected):
    """missing-eos: scores [.5,2,−3], stopped [1,0,0]."""
    f = wrap(lambda s, e: missing_eos(s, e, penalty=penalty, mode=mode))
    close(f(jnp.array([0.5, 2.0, -3.0]), jnp.array([True, False, False])), expected)


def test_missing_eos_names_the_known_modes():
    with pytest.raises(ValueError, match="replace, subtract"):
        missing_eos(jnp.zeros(1), jnp.zeros(1, bool), penalty=-1.0, mode="add")


def test_overlong_penalty():
    lengths = jnp.array([10, 80, 85, 90, 100])
    out = overlong_penalty(lengths, max_length=100, buffer=20)
    close(out, [0, 0, -0.25, -0.5, -1])


@jitted
@pytest.mark.parametrize("kl, beta", [(12.0, 0.201024), (6.0, 0.2), (0.0, 0.198976)])
def test_adaptive(wrap, kl, beta):
    """adaptive: β .2, target 6, horizon 1e4, n 256."""
    step = wrap(lambda s, kl: adaptive_kl(s, kl, 256, target=6.0, horizon=1e4))
    state = step(KLState.create(0.2), kl)
    close(state.beta, beta, 1e-7)
    assert state.beta.dtype == jnp.float32


def test_adaptive_is_proportional_inside_the_clip():
    state = adaptive_kl(KLState.create(1.0), 6.6, 1000, target=6.0, horizon=1e4)
    close(state.beta, 1 + 0.1 * 0.1)


@jitted
@pytest.mark.parametrize(
    "kl, beta", [(0.0, 0.1), (0.66, 0.1), (0.67, 0.2), (1.49, 0.2), (1.51, 0.4)]
)
def test_paper_kl(wrap, kl, beta):
    """β·2 above 1.5 target, β/2 below target/1.5."""
    state = wrap(lambda s, kl: paper_kl(s, kl, target=1.0))(KLState.create(0.2), kl)
    close(state.beta, beta, 1e-7)


def test_fixed_kl():
    assert fixed_kl(KLState.create(0.2), 1e9).beta == jnp.float32(0.2)


def test_controllers_carry_through_scan_and_vmap():
    kls = jnp.array([2.0, 2.0, 0.1])

    def run(beta):
        step = lambda s, kl: (paper_kl(s, kl, target=1.0), None)  # noqa: E731
        return jax.lax.scan(step, KLState.create(beta), kls)[0].beta

    close(jax.vmap(run)(jnp.array([1.0, 3.0])), [2.0, 6.0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_value_is_the_estimator_and_gradient_is_k2s(estimator):
    logp, ref = jnp.array([-1.0, -2.5]), jnp.array([-1.5, -1.0])
    m = jnp.ones(2, bool)
    f = lambda x: kl_loss(x, ref, m, estimator=estimator)[0]  # noqa: E731
    value, grad = jax.value_and_grad(f)(logp)
    close(value, kl_estimate(logp, ref, estimator=estimator).sum())
    close(grad, [0.5, -1.5])


def test_kl_loss_gradient_of_the_estimator_itself():
    logp, ref = jnp.array([-1.0, -2.5]), jnp.array([-1.5, -1.0])
    m = jnp.ones(2, bool)
    f = lambda x: kl_loss(x, ref, m, unbiased_grad=False)[0]  # noqa: E731
    close(jax.grad(f)(logp), 1 - np.exp([-0.5, 1.5]))
    with pytest.raises(ValueError, match="unbiased_grad"):
        kl_loss(logp, ref, m, estimator="k1", unbiased_grad=False)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_loss(logp, ref, m, estimator="kl")


def test_kl_loss_gradient_is_that_of_the_exact_kl():
    """Summed over the vocabulary under π, ∇ of the loss is ∇ KL[π ‖ π_ref]."""
    logits, ref = jnp.array([2.0, 1.0, 0.0]), jax.nn.log_softmax(jnp.arange(3.0))
    p = jax.nn.softmax(logits)

    def sampled(x):
        each = lambda i: kl_loss(  # noqa: E731
            jax.nn.log_softmax(x)[i][None], ref[i][None], jnp.ones(1, bool)
        )[0]
        return jnp.sum(p * jax.vmap(each)(jnp.arange(3)))

    exact = np.asarray(p, np.float64) * (
        np.asarray(jnp.log(p) - ref, np.float64) - 1.15042077
    )
    close(jax.grad(sampled)(logits), exact)


def test_wrong_shapes_are_refused():
    m = jnp.ones((2, 3), bool)
    x = jnp.zeros((2, 3))
    with pytest.raises((AssertionError, TypeError)):
        kl_penalty(x, x, jnp.zeros(3), m, beta=0.1)
    with pytest.raises((AssertionError, TypeError)):
        kl_penalty(x, x[:, :2], jnp.zeros(2), m, beta=0.1)
    with pytest.raises((AssertionError, TypeError)):
        kl_estimate(x, x[0])
