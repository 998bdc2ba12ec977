"""Scoring: right positions, right slots, and every option against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
import reference
import tiny

from jppo import rollout
from jppo.types import Rollout

B, P, T = tiny.B, tiny.P, tiny.T
HOT = 0.7


def rows_of(rolled):
    """(tokens of prompt and response without padding, prompt length) of each row."""
    valid = np.asarray(rolled.valid)
    for row, keep in zip(np.asarray(rolled.tokens), valid, strict=True):
        yield row[keep], keep[:P].sum()


def plain_policy(params, rolled, temperature=HOT):
    """(log-probs, entropies) [b, t] of the naive decoder, row by row."""
    logp, entropy = np.zeros((B, T)), np.zeros((B, T))
    for i, (row, p) in enumerate(rows_of(rolled)):
        logits = plain.logits(np, tiny.CFG, plain.float64(params), row)
        logs = plain.log_softmax(np, logits[p - 1 : -1] / temperature)
        n = len(row) - p
        logp[i, :n] = logs[np.arange(n), row[p:]]
        entropy[i, :n] = -(np.exp(logs) * logs).sum(-1)
    return logp, entropy


def plain_values(params, rolled):
    """V [b, t] before each response token."""
    values = np.zeros((B, T))
    for i, (row, p) in enumerate(rows_of(rolled)):
        v = plain.scalars(np, tiny.CFG, plain.float64(params), row)
        values[i, : len(row) - p] = v[p - 1 : -1]
    return values


@pytest.fixture(scope="module")
def away(py, rolled):
    """Scored with a reference that is another model: the KL is not 0."""
    state, frozen = py.trees(reference=tiny.params(seed=5))
    scored = py.programs.score(state, frozen, rolled, py.scores())
    return state, frozen, scored


def test_logp_values_and_entropy_stand_at_the_right_positions(away, rolled):
    """Position p − 1 … p + t − 2 predicts token p … p + t − 1, for every role."""
    state, frozen, (exp, metrics) = away
    mask = np.asarray(rolled.mask)
    logp, entropy = plain_policy(state.actor, rolled)
    ref, _ = plain_policy(frozen.reference, rolled)
    values = plain_values(state.critic, rolled)
    for got, expected in [
        (exp.logp_old, logp),
        (exp.logp_ref, ref),
        (np.where(mask, exp.values_old, 0.0), values),
    ]:
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(metrics["entropy"], entropy[mask].mean(), rtol=1e-5)
    np.testing.assert_array_equal(exp.tokens, rolled.tokens[:, P:])
    # A label off by one would be far outside the tolerance.
    assert np.abs(logp[:, :-1] - logp[:, 1:])[mask[:, 1:]].max() > 0.1


def test_experience_and_metrics_against_numpy(py, away, rolled):
    """Shaped rewards, GAE, whitening and every metric, from the roles' numbers."""
    state, frozen, (exp, metrics) = away
    logp, entropy = plain_policy(state.actor, rolled)
    roles = {
        "logp": logp,
        "entropy": entropy,
        "logp_ref": plain_policy(frozen.reference, rolled)[0],
        "values": plain_values(state.critic, rolled),
    }
    expected, fields = reference.experience(
        py.setup.config,
        roles,
        rolled.logp,
        tiny.scores(),
        rolled.mask,
        rolled.stopped,
        0.05,
    )
    assert set(expected) == set(metrics)
    gap = metrics.pop("sampler_gap_max"), expected.pop("sampler_gap_max")
    assert 0 < gap[0] < 5e-5 and gap[1] < 5e-5
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    for name, value in fields.items():
        got = getattr(exp, name)
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4, err_msg=name)
    assert abs(float(metrics["kl"])) > 0.1


def test_kl_is_exactly_zero_for_identical_params(scored):
    exp, metrics = scored
    np.testing.assert_array_equal(exp.logp_old, exp.logp_ref)
    assert metrics["kl"] == metrics["kl_token"] == 0.0
    assert jnp.abs(exp.logp_old).max() > 0.1


def test_a_nan_score_of_a_padding_row_leaves_no_trace(py):
    state, frozen = py.trees()
    prompts = py.prompts(weight=jnp.ones(B).at[2].set(0.0))
    rolled = py.programs.generate(state, frozen, prompts)
    assert rolled.lengths[2] == 0

    def with_score(x):
        scores = py.programs.put(tiny.scores().at[2].set(x))
        return py.programs.score(state, frozen, rolled, scores)

    zero, metrics = with_score(0.0)
    for bad in (np.nan, np.inf, 1e30):
        got = with_score(bad)
        assert tiny.distance(got, (zero, metrics)) == 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((zero, metrics)))
    assert metrics["sequences"] == B - 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequence_scores_at_the_last_valid_token(side):
    """Equal to the naive decoder's for rows of any length, padded on either side."""
    params = tiny.params(head=True)
    rng = np.random.default_rng(0)
    width = 6
    tokens = rng.integers(0, 16, (4, width)).astype(np.int32)
    lengths = np.array([6, 3, 1, 0])
    at = np.arange(width)
    mask = at >= width - lengths[:, None] if side == "left" else at < lengths[:, None]
    out = jax.jit(lambda p, x, m: rollout.sequence_scores(tiny.CFG, p, x, m))(
        params, tokens, mask
    )
    for row, keep, got in zip(tokens, mask, out, strict=True):
        if keep.any():
            naive = plain.scalars(np, tiny.CFG, plain.float64(params), row[keep])
            np.testing.assert_allclose(got, naive[-1], rtol=1e-5, atol=1e-5)
        assert np.isfinite(got)


def test_parts_keep_the_order_of_rows():
    x = jnp.arange(12.0).reshape(12, 1)
    seen = []

    def fn(a, b):
        seen.append(a.shape)
        return {"sum": a + b, "none": None}

    out = rollout.in_parts(fn, 3, x, x + 0.5)
    np.testing.assert_array_equal(out["sum"], 2 * x + 0.5)
    assert out["none"] is None and seen == [(4, 1)]


def test_reward_tree_scores_the_whole_sequence(rm):
    state, frozen = rm.trees()
    rolled = rm.programs.generate(state, frozen, rm.prompts())
    _, metrics = rm.programs.score(state, frozen, rolled)
    params = plain.float64(frozen.reward)
    naive = [plain.scalars(np, tiny.CFG, params, row)[-1] for row, _ in rows_of(rolled)]
    np.testing.assert_allclose(metrics["scores"], np.mean(naive), rtol=1e-5)


def test_frozen_trunks_change_no_number(rm):
    """Roles on shared frozen trunks give what whole models give (tied head too)."""
    change = {"critic.init": "reward"}
    whole = tiny.make_setup(change, cfg=tiny.TIED, reward=True)
    cut = tiny.make_setup(change, cfg=tiny.TIED, reward=True, frozen=1, on_critic=True)
    prompts = tiny.prompts()
    mask = jnp.arange(T) < jnp.array([5, 4, 3, 2, 1, 5, 5, 0])[:, None]
    tokens = jax.random.randint(jax.random.key(0), (B, T), 0, 16)
    rolled = Rollout(
        tokens=jnp.concatenate([prompts.tokens, tokens], 1),
        valid=jnp.concatenate([prompts.mask, mask], 1),
        mask=mask,
        logp=jnp.zeros((B, T)),
        stopped=jnp.ones(B, bool),
        stop_index=jnp.zeros(B, jnp.int32),
        lengths=mask.sum(-1, dtype=jnp.int32),
    )
    out = []
    for setup in (whole, cut):
        state, frozen = tiny.first_trees(setup)
        run = jax.jit(lambda s, f, r, setup=setup: rollout.score(setup, s, f, r))
        out.append(run(state, frozen, rolled))
    (exp, metrics), (exp_cut, metrics_cut) = out
    tiny.close(metrics_cut, metrics)
    assert exp.actor_in.ndim == 2 and exp_cut.actor_in.ndim == 3
    same = {"actor_in": None, "critic_in": None}
    tiny.close(exp_cut.replace(**same), exp.replace(**same))
