"""Masked statistics: goldens, and what stands under the mask never matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.masked import aggregate, masked_mean, masked_sum, masked_var, whiten

X = jnp.array([1.0, 2.0, 3.0, 4.0])
M = jnp.array([False, True, True, False])
ROWS = jnp.array([[1.0, 99.0, 99.0], [2.0, 2.0, 2.0]])
ROWS_MASK = jnp.array([[True, False, False], [True, True, True]])
MODES = {
    "token-mean": 1.75,
    "seq-mean-token-mean": 1.5,
    "seq-mean-token-sum": 3.5,
    "seq-mean-token-sum-norm": 1.16666667,
}
both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


def close(actual, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tol, atol=tol)


@both
def test_stats(wrap):
    """stats: mean 2.5, var .5 / .25, sum 5."""
    close(wrap(masked_sum)(X, M), 5.0)
    close(wrap(masked_mean)(X, M), 2.5)
    close(wrap(masked_var)(X, M), 0.5)
    close(wrap(lambda x, m: masked_var(x, m, ddof=0))(X, M), 0.25)


@both
@pytest.mark.parametrize("ddof, expected", [(1, 0.70710677), (0, 0.99999998)])
def test_stats_whiten(wrap, ddof, expected):
    """stats: whitened ∓.70710677 (ddof 1), ∓.99999998 (ddof 0)."""
    y = wrap(lambda x, m: whiten(x, m, ddof=ddof))(X, M)
    close(y, [0.0, -expected, expected, 0.0], 2e-7)


def test_whiten_keeps_the_mean():
    y = whiten(X, M, shift_mean=False)
    close(y, [0.0, 2.5 - 0.70710677, 2.5 + 0.70710677, 0.0])


def test_stats_under_vmap():
    x = jnp.stack([X, 10 * X])
    close(jax.vmap(masked_mean, (0, None))(x, M), [2.5, 25.0])
    close(jax.vmap(masked_var, (0, None))(x, M), [0.5, 50.0])


def test_axis():
    x, m = jnp.arange(6.0).reshape(2, 3), jnp.array([[1, 1, 0], [0, 1, 1]], bool)
    close(masked_sum(x, m, axis=1), [1.0, 9.0])
    close(masked_mean(x, m, axis=1), [0.5, 4.5])
    close(masked_mean(x, m, axis=0), [0.0, 2.5, 5.0])
    close(masked_var(x, m, axis=1), [0.5, 0.5])
    close(masked_var(x, m, axis=0), [0.0, 4.5, 0.0])
    close(masked_var(x, m, axis=(0, 1)), np.var([0, 1, 4, 5], ddof=1))


@both
def test_nan_mask(wrap):
    """nan-mask: masked_mean([1,2,nan,4],[1,0,0,1]) is 2.5 with a finite gradient."""
    x, m = jnp.array([1.0, 2.0, jnp.nan, 4.0]), jnp.array([1, 0, 0, 1], bool)
    value, grad = wrap(jax.value_and_grad(masked_mean))(x, m)
    close(value, 2.5)
    close(grad, [0.5, 0.0, 0.0, 0.5])


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, 999.0])
def test_nan_mask_in_variance_and_whitening(poison):
    x = jnp.array([1.0, 2.0, 3.0, 7.0])
    m = jnp.array([1, 1, 0, 1], bool)
    bad = x.at[2].set(poison)
    weights = jnp.array([1.0, -2.0, 5.0, 3.0])
    for f in (masked_var, lambda x, m: jnp.sum(weights * whiten(x, m))):
        (v, g), (v_bad, g_bad) = (jax.value_and_grad(f)(a, m) for a in (x, bad))
        assert float(v_bad) == float(v) != 0.0
        np.testing.assert_array_equal(g_bad, g)
        assert g[2] == 0.0


@pytest.mark.parametrize("valid", [0, 1])
def test_too_few_valid(valid):
    """n ≤ 1 valid → 0, with a finite gradient."""
    m = jnp.arange(4) < valid
    for shift_mean in (True, False):
        f = lambda x, s=shift_mean: whiten(x, m, shift_mean=s)  # noqa: E731
        close(f(X), np.zeros(4))
        assert jnp.isfinite(jax.jacobian(f)(X)).all()
    for ddof in (0, 1):
        value, grad = jax.value_and_grad(masked_var)(X, m, ddof=ddof)
        assert value == 0.0 and jnp.all(grad == 0.0)
    assert masked_mean(X, m) == (1.0 if valid else 0.0)


def test_whiten_gradient_is_finite_for_equal_values():
    x = jnp.full((4,), 3.0)
    grad = jax.jacobian(lambda x: whiten(x, jnp.ones(4, bool)))(x)
    assert jnp.isfinite(grad).all()


@both
@pytest.mark.parametrize("mode", MODES)
def test_aggregate(wrap, mode):
    """aggregate: rows [1], [2,2,2], L=3 → 1.75, 1.5, 3.5, 1.16666667."""
    total, count = wrap(lambda x, m: aggregate(x, m, mode=mode, length=3))(
        ROWS, ROWS_MASK
    )
    close(total / count, MODES[mode])
    assert count == (4.0 if mode == "token-mean" else 2.0)
    assert total.dtype == count.dtype == jnp.float32


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_ignores_empty_rows(mode):
    x = jnp.concatenate([ROWS, jnp.full((2, 3), jnp.nan)])
    m = jnp.concatenate([ROWS_MASK, jnp.zeros((2, 3), bool)])
    f = lambda x: aggregate(x, m, mode=mode, length=3)  # noqa: E731
    (total, count), grad = jax.value_and_grad(f, has_aux=True)(x)
    close(total / count, MODES[mode])
    assert jnp.isfinite(grad).all() and jnp.all(grad[2:] == 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_adds_up_over_micro_batches(mode):
    parts = [aggregate(ROWS[i : i + 1], ROWS_MASK[i : i + 1], mode=mode, length=3)
             for i in range(2)]  # fmt: skip
    total, count = (sum(p) for p in zip(*parts, strict=True))
    close(total / count, MODES[mode])


def test_aggregate_gradients():
    """Each mode weighs the tokens of a short row differently."""
    expected = {
        "token-mean": [1 / 4, 1 / 4],
        "seq-mean-token-mean": [1 / 2, 1 / 6],
        "seq-mean-token-sum": [1 / 2, 1 / 2],
        "seq-mean-token-sum-norm": [1 / 6, 1 / 6],
    }
    for mode, (short, long) in expected.items():

        def mean(x, mode=mode):
            total, count = aggregate(x, ROWS_MASK, mode=mode, length=3)
            return total / count

        close(jax.grad(mean)(ROWS), [[short, 0, 0], [long] * 3])


def test_aggregate_names_the_known_modes():
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(ROWS, ROWS_MASK, mode="mean")
    with pytest.raises(ValueError, match="length"):
        aggregate(ROWS, ROWS_MASK, mode="seq-mean-token-sum-norm")


def test_results_are_float32():
    x = jnp.array([1, 2, 3], jnp.bfloat16)
    m = jnp.ones(3, bool)
    for y in (masked_sum(x, m), masked_mean(x, m), masked_var(x, m), whiten(x, m)):
        assert y.dtype == jnp.float32
    assert masked_mean(m, m) == 1.0


def test_wrong_shapes_are_refused():
    with pytest.raises((AssertionError, TypeError)):
        masked_mean(X, M[:3])
    with pytest.raises((AssertionError, TypeError)):
        masked_mean(X, M.astype(jnp.float32))
