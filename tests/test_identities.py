"""Identities that hold for every input, checked by hypothesis on random batches.

Shapes are fixed so that each program compiles once; data, masks and coefficients
vary. Expected values are computed in float64 by other means than the library's.
"""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.advantages import gae_scan, nstep_returns
from jppo.kl import full_kl, kl_estimate, kl_penalty
from jppo.logprobs import token_logprobs
from jppo.losses import clip_loss, kl_loss, value_loss
from jppo.masked import AGGREGATIONS, aggregate, masked_mean, masked_var, whiten

B, T, V = 4, 6, 5
quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)
unit = st.floats(0.0, 1.0, width=32)
masks = st.lists(st.booleans(), min_size=B * T, max_size=B * T)
UNTIL = np.arange(T) < np.array([[T], [3], [1], [0]])  # lengths max, 3, 1 and 0

gae = jax.jit(
    lambda r, v, m, gamma, lam: jax.vmap(
        lambda r, v, m: gae_scan(r, v, m, gamma=gamma, lam=lam)
    )(r, v, m)
)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def grid(mask):
    return np.array(mask, bool).reshape(B, T)


def close(actual, expected, tol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tol, atol=tol)


@quick
@given(seeds, masks, unit, unit)
def test_gae_is_the_double_sum(seed, mask, gamma, lam):
    """scan = O(T²) sum A_t = Σ_k (γλ)ᵏ δ_{t+k} over the valid positions."""
    r, v, m = normal(seed, B, T), normal(seed + 1, B, T), grid(mask)
    advantages, returns = gae(r, v, m, gamma, lam)
    expected = np.zeros((B, T))
    for b in range(B):
        rv, vv = r[b, m[b]].astype(float), v[b, m[b]].astype(float)
        delta = rv + gamma * np.append(vv[1:], 0.0) - vv if len(vv) else vv
        expected[b, m[b]] = [
            sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:]))
            for t in range(len(delta))
        ]
    close(advantages, expected)
    close(returns, np.where(m, expected + v, 0.0))


@quick
@given(seeds, unit)
def test_gae_lambda_zero_is_the_td_error(seed, gamma):
    r, v, m = normal(seed, B, T), normal(seed + 1, B, T), np.ones((B, T), bool)
    td = r + gamma * np.pad(v[:, 1:], ((0, 0), (0, 1))) - v
    close(gae(r, v, m, gamma, 0.0)[0], td)


@quick
@given(seeds, unit)
def test_gae_lambda_one_is_the_return_minus_the_value(seed, gamma):
    r, v, m = normal(seed, B, T), normal(seed + 1, B, T), np.ones((B, T), bool)
    discount = np.triu(gamma ** np.abs(np.arange(T) - np.arange(T)[:, None]))
    monte_carlo = r.astype(float) @ discount.T
    advantages, returns = gae(r, v, m, gamma, 1.0)
    close(advantages, monte_carlo - v)
    close(returns, monte_carlo)


nstep = {
    n: jax.jit(lambda r, v, m, gamma, n=n: nstep_returns(r, v, m, n=n, gamma=gamma))
    for n in (1, T)
}


@quick
@given(seeds, masks, unit)
def test_nstep_returns_are_the_ends_of_lambda_returns(seed, mask, gamma):
    """n = T equals λ-returns at λ = 1, and n = 1 those at λ = 0."""
    r, v, m = normal(seed, B, T), normal(seed + 1, B, T), grid(mask)
    for n, lam in ((1, 0.0), (T, 1.0)):
        _, returns = gae(r, v, m, gamma, lam)
        close(nstep[n](r[0], v[0], m[0], gamma), returns[0])


@quick
@given(seeds, masks)
def test_gae_through_gaps_is_gae_without_them(seed, mask):
    """Valid entries pushed to the left, or to the right, have the same advantages."""
    r, v, m = normal(seed, B, T), normal(seed + 1, B, T), grid(mask)
    plain = np.asarray(gae(r, v, m, 0.9, 0.8)[0])
    for first in (~m, m):  # stable sorts: valid entries first, then valid entries last
        order = np.argsort(first, axis=1, kind="stable")
        moved = [np.take_along_axis(x, order, 1) for x in (r, v, m)]
        expected = np.take_along_axis(plain, order, 1)
        close(gae(*moved, 0.9, 0.8)[0], expected)


@jax.jit
def policy_gradients(logits, tokens, advantages, mask):
    """∇ of the clipped loss at ρ ≡ 1."""

    def loss(logits):
        logp = token_logprobs(logits, tokens)
        return clip_loss(logp, jax.lax.stop_gradient(logp), advantages, mask)[0]

    return jax.grad(loss)(logits)


@quick
@given(seeds, masks)
def test_gradient_at_ratio_one_is_the_policy_gradient(seed, mask):
    """ρ ≡ 1 → ∇L_clip = −Σ A ∇ log π, with ∇ log π = onehot − π by hand."""
    logits, a, m = normal(seed, B, T, V), normal(seed + 1, B, T), grid(mask)
    tokens = np.random.default_rng(seed + 2).integers(0, V, (B, T)).astype(np.int32)
    p = np.exp(logits.astype(float))
    score = np.eye(V)[tokens] - p / p.sum(-1, keepdims=True)
    expected = -(a * m)[..., None] * score
    close(policy_gradients(logits, tokens, a, m), expected)


@jax.jit
def expectations(x, y):
    p, q = jax.nn.log_softmax(x), jax.nn.log_softmax(y)
    mean = lambda k: jnp.sum(jnp.exp(p) * kl_estimate(p, q, estimator=k), -1)  # noqa: E731
    return full_kl(x, y), mean("k1"), mean("k3")


@quick
@given(seeds)
def test_k1_and_k3_agree_in_expectation(seed):
    x, y = normal(seed, B, V), normal(seed + 1, B, V)
    p, q = (np.exp(z.astype(float)) for z in (x, y))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    for estimate in expectations(x, y):
        close(estimate, (p * np.log(p / q)).sum(-1))


@jax.jit
def tempered(x, tokens, temperature):
    a = token_logprobs(x, tokens, temperature=temperature)
    b = token_logprobs(x + 0.0, tokens, temperature=temperature)
    return [kl_estimate(a, b, estimator=k) for k in ("k1", "k2", "k3")] + [
        full_kl(x, x, temperature=temperature)
    ]


@quick
@given(seeds, st.floats(0.125, 8.0, width=32))
def test_identical_params_have_kl_zero_at_any_temperature(seed, temperature):
    x = 5 * normal(seed, B, T, V)
    tokens = np.random.default_rng(seed).integers(0, V, (B, T)).astype(np.int32)
    for kl in tempered(x, tokens, temperature):
        assert jnp.all(kl == 0.0)


@quick
@given(seeds)
def test_reward_without_beta_is_the_score_at_the_last_token(seed):
    logp, ref, scores = normal(seed, B, T), normal(seed + 1, B, T), normal(seed + 2, B)
    args = [jnp.asarray(x) for x in (logp, ref, scores, UNTIL)]
    rewards = np.asarray(kl_penalty(*args, beta=0.0))
    expected = np.zeros((B, T), np.float32)
    for b, last in enumerate((T - 1, 2, 0)):
        expected[b, last] = scores[b]
    np.testing.assert_array_equal(rewards, expected)


def losses(mode):
    """(total, count) and gradient of everything, at one aggregation."""
    how = {"aggregation": mode, "length": T}

    def total(x, old, a, m):
        p, count, _ = clip_loss(x, old, a, m, **how)
        v, _, _ = value_loss(x, old, a, m, eps=0.5, **how)
        k, _, _ = kl_loss(x, old, m, **how)
        return p + v + k, count

    return jax.jit(jax.value_and_grad(total, has_aux=True))


LOSSES = {mode: losses(mode) for mode in AGGREGATIONS}


@quick
@given(seeds, masks, st.sampled_from(AGGREGATIONS))
def test_micro_batches_change_nothing(seed, mask, mode):
    """Totals, counts and gradients of the rows add up to those of the batch."""
    x, old, a = (0.3 * normal(seed + i, B, T) for i in range(3))
    m = grid(mask)
    (total, count), grad = LOSSES[mode](x, old, a, m)
    rows = np.eye(B, dtype=bool)[:, :, None] & m  # each row alone in the batch
    parts = [LOSSES[mode](x, old, a, row) for row in rows]
    close(sum(p[0][0] for p in parts), total)
    assert sum(p[0][1] for p in parts) == count
    close(sum(p[1] for p in parts), grad)


@quick
@given(seeds, masks, st.sampled_from(AGGREGATIONS), st.permutations(range(B)))
def test_batch_order_and_padding_change_nothing(seed, mask, mode, order):
    x, old, a = (0.3 * normal(seed + i, B, T) for i in range(3))
    m, order = grid(mask), np.array(order)
    (total, count), grad = LOSSES[mode](x, old, a, m)
    moved = LOSSES[mode](*(z[order] for z in (x, old, a, m)))
    close(moved[0][0], total)
    assert moved[0][1] == count
    close(moved[1], np.asarray(grad)[order])
    poisoned = LOSSES[mode](*(np.where(m, z, np.nan) for z in (x, old, a)), m)
    close(poisoned[0][0], total)
    close(poisoned[1], grad)
    assert np.all(np.asarray(grad)[~m] == 0)


@jax.jit
def statistics(x, m):
    return masked_mean(x, m), masked_var(x, m), masked_var(x, m, ddof=0), whiten(x, m)


@quick
@given(seeds, masks)
def test_masked_statistics_are_those_of_the_valid_entries(seed, mask):
    x, m = 3 + normal(seed, B, T), grid(mask)
    mean, var, var0, white = map(np.asarray, statistics(x, m))
    valid = x[m].astype(float)
    n = len(valid)
    close(mean, valid.mean() if n else 0.0)
    close(var, valid.var(ddof=1) if n > 1 else 0.0)
    close(var0, valid.var() if n else 0.0)
    assert np.all(white[~m] == 0)
    if n > 1:
        close([white[m].mean(), white[m].std(ddof=1)], [0.0, 1.0], 1e-4)
        assert np.all(np.argsort(white[m]) == np.argsort(x[m]))
    else:
        assert np.all(white == 0)


aggregates = {
    mode: jax.jit(lambda x, m, mode=mode: aggregate(x, m, mode=mode, length=T))
    for mode in AGGREGATIONS
}


@quick
@given(seeds, masks)
def test_aggregations_by_hand(seed, mask):
    x, m = normal(seed, B, T), grid(mask)
    rows = [x[b, m[b]].astype(float) for b in range(B) if m[b].any()]
    if not rows:
        rows = [np.zeros(0)]
    sums = [r.sum() for r in rows]
    expected = {
        "token-mean": sum(sums) / max(m.sum(), 1),
        "seq-mean-token-mean": np.mean([r.mean() if len(r) else 0.0 for r in rows]),
        "seq-mean-token-sum": np.mean(sums),
        "seq-mean-token-sum-norm": np.mean(sums) / T,
    }
    for mode, value in expected.items():
        total, count = aggregates[mode](x, m)
        close(total / max(float(count), 1.0), value)


def test_n_plus_shape():
    """N+ shape: over four epochs on one batch approx_kl and clip_frac grow from 0."""
    tokens = jnp.array(np.random.default_rng(0).integers(0, 5, (8, 6)))
    advantages = whiten(jnp.array(normal(1, 8, 6)), tokens >= 0)

    def loss(logits, logp_old):
        logp = jax.nn.log_softmax(logits)
        logp = jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]
        logp_old = logp if logp_old is None else logp_old
        total, count, metrics = clip_loss(logp, logp_old, advantages, tokens >= 0)
        return total / count, (logp, {k: v / count for k, v in metrics.items()})

    step = jax.jit(jax.grad(loss, has_aux=True))
    logits, logp_old, seen = jnp.zeros((8, 6, 5)), None, []
    for _ in range(4):
        grad, (logp, metrics) = step(logits, logp_old)
        logp_old = logp if logp_old is None else logp_old
        logits = logits - 6.0 * grad
        seen.append((metrics["approx_kl"], metrics["clip_frac"]))
    kl, clipped = np.array(seen).T
    assert kl[0] == clipped[0] == 0.0
    assert (np.diff(kl) > 0).all() and clipped[1] > 0
    assert (np.diff(clipped) >= 0).all() and clipped[-1] > clipped[1]
