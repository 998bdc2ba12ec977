"""Sampling: the right distribution, and never a token that is not in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo import sampling
from jppo.sampling import greedy, min_p, restrict, sample, top_k, top_p

NINF = -np.inf
LOG = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
draw = jax.jit(sample, static_argnames=("top_k",))


def normal(seed, *shape):
    # numpy: every new shape of jax.random would compile for a second
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def kept(logits):
    return np.isfinite(np.asarray(logits)).tolist()


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def chi_square(tokens, p):
    """Pearson's statistic of the counts against p."""
    expected = np.asarray(p, np.float64) * len(tokens)
    counts = np.bincount(np.asarray(tokens), minlength=len(p))
    return ((counts - expected) ** 2 / expected).sum()


def test_with_temperature():
    out = sampling.with_temperature(jnp.array([2.0, 1.0]), temperature=0.5)
    np.testing.assert_array_equal(out, [4.0, 2.0])
    with pytest.raises(ValueError, match="greedy"):
        sampling.with_temperature(LOG, temperature=0.0)


def test_top_k():
    x = jnp.array([[1.0, 3.0, 2.0, 0.0], [0.0, -1.0, -2.0, 5.0]])
    assert kept(top_k(x, k=2)) == [
        [False, True, True, False],
        [True, False, False, True],
    ]
    assert kept(top_k(x, k=1))[0] == [False, True, False, False]
    assert kept(top_k(jnp.array([1.0, 1.0, 1.0, 0.0]), k=2)) == [True] * 3 + [False]
    for k in (0, 4, 100):
        np.testing.assert_array_equal(top_k(x, k=k), x)
    with pytest.raises(ValueError, match="negative"):
        top_k(x, k=-1)


@pytest.mark.parametrize(
    "p, n", [(0.0, 1), (0.3, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.95, 4)]
)
def test_top_p(p, n):
    """The fewest likeliest tokens that reach p; in any order; p traced or not."""
    order = jnp.array([2, 0, 3, 1])
    expected = np.arange(4)[order] < n
    np.testing.assert_array_equal(kept(top_p(LOG[order], p=p)), expected)
    traced = jax.jit(lambda p: top_p(LOG[order], p=p))(jnp.float32(p))
    np.testing.assert_array_equal(kept(traced), expected)


def test_top_p_of_one_changes_nothing():
    x = normal(0, 3, 1000) * 5
    np.testing.assert_array_equal(top_p(x, p=1.0), x)
    np.testing.assert_array_equal(top_p(x, p=1), x)
    np.testing.assert_array_equal(jax.jit(lambda p: top_p(x, p=p))(1.0), x)


def test_top_p_keeps_ties():
    assert kept(top_p(jnp.zeros(4), p=0.3)) == [True] * 4
    assert kept(top_p(jnp.array([5.0, NINF, 0.0]), p=0.5)) == [True, False, False]


@pytest.mark.parametrize("p, n", [(0.0, 4), (0.19, 4), (0.21, 3), (0.49, 2), (0.9, 1)])
def test_min_p(p, n):
    """Tokens of at least p × .5."""
    np.testing.assert_array_equal(kept(min_p(LOG, p=p)), np.arange(4) < n)
    traced = jax.jit(lambda p: min_p(LOG, p=p))(jnp.float32(p))
    np.testing.assert_array_equal(kept(traced), np.arange(4) < n)


def test_order_is_temperature_then_top_k_then_top_p_then_min_p():
    # Among the top 3 the first has p = .5/.9 = .556: top-p .55 after top-k keeps it
    # alone; before top-k it would keep two.
    assert kept(restrict(LOG, top_k=3, top_p=0.55)) == [True, False, False, False]
    # T=2 flattens to p ∝ √p: .379, .268, …; top-p .45 then keeps two, not one.
    assert kept(restrict(LOG, temperature=2.0, top_p=0.45)) == [
        True,
        True,
        False,
        False,
    ]
    assert kept(restrict(LOG, temperature=0.5, min_p=0.2)) == [True, True, False, False]


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.25}],
    ids=str,
)
def test_sample_has_the_right_distribution(how):
    """χ² below the 1 − 1e-5 quantile; nothing outside the support."""
    n, order = 4000, jnp.array([3, 1, 0, 2])
    x = LOG[order]
    support = {"top_k": 3, "top_p": 3, "min_p": 3}.get(next(iter(how), ""), 4)
    p = np.array([0.5, 0.25, 0.15, 0.1]) ** (1 / how.get("temperature", 1.0))
    p = np.where(np.arange(4) < support, p, 0.0)[order]
    p /= p.sum()
    tokens = draw(keys(n), jnp.tile(x, (n, 1)), **how)
    assert tokens.dtype == jnp.int32
    inside = p > 0
    assert inside[np.asarray(tokens)].all()
    rank = np.cumsum(inside) - 1
    assert chi_square(rank[np.asarray(tokens)], p[inside]) < 26


def test_sample_over_many_blocks():
    """A vocabulary of several blocks, the last one cut: χ² over coarse bins."""
    n, v = 4000, 1000
    x = normal(7, v) * 2
    p = np.exp(np.asarray(x, np.float64))
    p /= p.sum()
    tokens = np.asarray(draw(keys(n, 3), jnp.broadcast_to(x, (n, v))))
    assert tokens.min() >= 0 and tokens.max() < v
    for bins in (np.arange(v) // 100, np.arange(v) % 10):
        q = np.bincount(bins, weights=p)
        assert chi_square(bins[tokens], q) < 42  # 9 degrees of freedom


def test_rare_tokens_of_a_large_vocabulary_are_not_lost():
    """49 999 tokens of 1e-5 each behind one of ½: as frequent as they should be."""
    n, v = 256, 50_000
    x = jnp.full((v,), np.log(0.5 / (v - 1))).at[17].set(np.log(0.5))
    tokens = np.asarray(draw(keys(n, 5), jnp.broadcast_to(x, (n, v))))
    rare = tokens[tokens != 17]
    assert 90 < len(rare) < 166  # ½ ± 4.7σ
    assert len(np.unique(rare)) > 0.95 * len(rare)
    assert abs(rare.mean() - v / 2) < 5 * v / np.sqrt(12 * len(rare))


def test_sample_never_draws_what_cannot_be():
    x = jnp.where(jnp.arange(1000) % 37 == 5, 0.0, NINF)
    tokens = np.asarray(draw(keys(4000), jnp.broadcast_to(x, (4000, 1000))))
    assert (tokens % 37 == 5).all()
    assert len(np.unique(tokens)) == 27


@pytest.mark.parametrize("only", [0, 255, 256, 299])
def test_sample_of_one_possible_token(only):
    x = jnp.full((300,), NINF).at[only].set(-1e4)
    assert (draw(keys(64), jnp.broadcast_to(x, (64, 300))) == only).all()


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_choose_at_the_ends(u):
    """u = 0 and the largest u < 1 find the first and the last possible index."""
    w = jnp.array([[0.0, 0.3, 0.0, 0.7, 0.0, 0.0], [0.1] * 6])
    choice = sampling._choose(w, jnp.full((2,), u))
    np.testing.assert_array_equal(choice, [1, 0] if u == 0 else [3, 5])


def test_choose_inverts_the_cumulative_sum():
    w = jnp.tile(jnp.array([1.0, 2.0, 1.0]), (4, 1))
    u = jnp.array([0.24, 0.26, 0.74, 0.76])
    np.testing.assert_array_equal(sampling._choose(w, u), [0, 1, 1, 2])


def test_a_row_does_not_depend_on_its_neighbours():
    k, x = keys(6), normal(1, 6, 500)
    whole = draw(k, x)
    np.testing.assert_array_equal(draw(k[::-1], x[::-1]), whole[::-1])
    np.testing.assert_array_equal(draw(k[:1], x[:1]), whole[:1])
    assert len(np.unique(draw(keys(6, 1), x))) > 1
    assert (draw(keys(6, 1), x) != whole).any()


def test_two_batch_axes():
    k, x = keys(6), normal(1, 6, 20)
    flat = draw(k, x)
    np.testing.assert_array_equal(
        draw(k.reshape(2, 3), x.reshape(2, 3, 20)), flat.reshape(2, 3)
    )


def test_greedy():
    x = jnp.array([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0]])
    assert greedy(x).tolist() == [1, 0] and greedy(x).dtype == jnp.int32


def test_one_key_a_row():
    with pytest.raises((AssertionError, TypeError)):
        sample(keys(3), jnp.zeros((4, 5)))
