"""The update: exact where nothing was trained yet, and blind to how it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jppo import ppo
from jppo.masked import AGGREGATIONS
from jppo.state import make_optimizers
from jppo.types import Experience

B, P, T = tiny.B, tiny.P, tiny.T


@pytest.fixture(scope="module")
def cut(make_world):
    """2 minibatches × 2 micro-batches × 2 epochs; the critic is a head on the actor."""
    parts = {"ppo.minibatches": 2, "ppo.micro_batches": 2}
    return make_world(tiny.make_setup(parts | {"critic.layout": "shared"}))


@pytest.fixture(scope="module")
def gradients():
    """Gradients and metrics of one minibatch of the real model, by setup."""

    def run(setup, actor, critic, experience):
        beta = jnp.float32(0.05)
        return ppo.minibatch_gradients(
            setup, (actor, critic), tiny.NO_TREES, experience, beta
        )

    return jax.jit(run, static_argnums=0)


# --- the first minibatch, and the ones after it ---------------------------------------


@pytest.mark.parametrize("world", ["py", "cut"])
def test_nothing_is_off_policy_before_the_first_step(world, request):
    """Ratio exactly 1, KL exactly 0, nothing clipped, in the compiled program."""
    world = request.getfixturevalue(world)
    _, metrics = world.programs.update(*world.trees(), *world.scored)
    first = {k.split("/")[1]: v[0] for k, v in metrics.items() if "steps/" in k}
    assert first["ratio"] == first["ratio_max"] == 1.0
    assert first["approx_kl"] == first["approx_kl_k3"] == 0.0
    assert first["clip_frac"] == first["value_clip_frac"] == 0.0
    if world.setup.config.ppo.minibatches == 1:  # whitened advantages have mean 0
        assert abs(first["policy_loss"]) < 1e-6


@pytest.mark.parametrize("world", ["py", "cut"])
def test_later_epochs_are_off_policy_and_clipped(world, request):
    """Old log-probs are of the rollout, not of the epoch: the clip can act."""
    world = request.getfixturevalue(world)
    _, metrics = world.programs.update(*world.trees(), *world.scored)
    last = {k.split("/")[1]: v[-1] for k, v in metrics.items() if "steps/" in k}
    assert abs(last["ratio"] - 1.0) > 1e-4 and last["ratio_max"] > 1.2
    assert last["approx_kl"] > 1e-4 and last["approx_kl_k3"] > 1e-4
    assert last["clip_frac"] > 0.0


@pytest.mark.parametrize("world, steps", [("py", 2), ("cut", 4)])
def test_optimizer_steps_are_epochs_times_minibatches(world, steps, request):
    world = request.getfixturevalue(world)
    state, metrics = world.programs.update(*world.trees(), *world.scored)
    assert metrics["steps/policy_loss"].shape == (steps,)
    for opt in (state.opt_actor, state.opt_critic):
        counts = [x for x in jax.tree.leaves(opt) if x.dtype == jnp.int32]
        assert counts and all(count == steps for count in counts)
    assert state.step == 1


def test_metrics_are_folded_over_steps(cut):
    """Means over optimizer steps, but maxima of maxima and the sum of skips."""
    _, metrics = cut.programs.update(*cut.trees(), *cut.scored)
    steps = {k[6:]: np.asarray(v) for k, v in metrics.items() if "steps/" in k}
    for name, values in steps.items():
        fold = {"ratio_max": np.max, "skipped": np.sum}.get(name, np.mean)
        np.testing.assert_allclose(metrics[name], fold(values), rtol=1e-6)
    assert np.ptp(steps["ratio_max"]) > 0


def test_minibatches_cover_every_row_once_an_epoch():
    setup = tiny.make_setup({"ppo.minibatches": 4, "ppo.epochs": 3})
    rows = np.asarray(ppo.minibatch_rows(setup, jax.random.key(0), B))
    assert rows.shape == (12, 2)
    epochs = rows.reshape(3, B)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(B), (3, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 3  # a new order each epoch
    other = ppo.minibatch_rows(setup, jax.random.key(1), B)
    assert not np.array_equal(rows, other)


def test_a_single_minibatch_is_not_shuffled():
    rows = ppo.minibatch_rows(tiny.make_setup(), jax.random.key(0), B)
    np.testing.assert_array_equal(rows, np.tile(np.arange(B), (2, 1)))


# --- how the batch is cut


def table_experience(lengths=(5, 3, 1, 5, 2, 0, 4, 5), junk=0.0):
    """Experience of table networks, with `junk` in every field under the mask."""
    rng = np.random.default_rng(0)
    mask = np.arange(T) < np.array(lengths)[:, None]
    draws = rng.normal(size=(5, B, T))
    draws = jnp.asarray(np.where(mask, draws, junk), jnp.float32)
    rows, ones = jnp.arange(B), jnp.asarray(np.where(mask, 1.0, junk), jnp.float32)
    names = ("logp_old", "logp_ref", "values_old", "advantages", "returns")
    return Experience(
        actor_in=rows,
        critic_in=rows,
        tokens=jnp.zeros((B, T), jnp.int32),
        valid=jnp.ones((B, P + T), bool),
        mask=jnp.asarray(mask),
        weights=ones,
        scores=jnp.zeros(B),
        **dict(zip(names, draws, strict=True)),
    )


def tables(exp, shift=0.1):
    return {"table": exp.logp_old + shift}, {"table": exp.values_old - shift}


@pytest.fixture
def table_networks(monkeypatch):
    tiny.use_tables(monkeypatch)


EVERYTHING = {
    "ppo.entropy_coef": 0.1,
    "kl.where": "loss",
    "ppo.tis_cap": 1.5,
    "ppo.dual_clip": 3.0,
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_change_nothing(table_networks, mode):
    """Ragged rows in 1 or 4 parts: one division, after accumulation."""
    exp = table_experience()

    def run(n):
        settings = {"ppo.micro_batches": n, "ppo.aggregation": mode}
        setup = tiny.make_setup(EVERYTHING | settings)
        beta = jnp.float32(0.3)
        return ppo.minibatch_gradients(setup, tables(exp), tiny.NO_TREES, exp, beta)

    whole = run(1)
    tiny.close(run(4), whole, 1e-6)
    # Rows weigh by their lengths in one mode and equally in another.
    (actor, _), _ = whole
    assert np.isfinite(actor["table"]).all() and jnp.abs(actor["table"]).max() > 1e-3


def test_an_empty_minibatch_has_no_gradient(table_networks):
    exp = table_experience(lengths=(0,) * 8)
    beta = jnp.float32(0.3)
    grads, metrics = ppo.minibatch_gradients(
        tiny.make_setup(EVERYTHING), tables(exp), tiny.NO_TREES, exp, beta
    )
    assert all((g == 0).all() for g in jax.tree.leaves(grads))
    assert all(np.isfinite(m) for m in metrics.values())


@pytest.mark.parametrize("junk", [999.0, np.nan, -np.inf])
def test_masked_tokens_have_no_gradient(table_networks, junk):
    """Exactly 0 under the mask, and the other numbers do not know what stands there."""
    setup, beta = tiny.make_setup(EVERYTHING), jnp.float32(0.3)

    def run(exp):
        return ppo.minibatch_gradients(setup, tables(exp), tiny.NO_TREES, exp, beta)

    (grads, metrics), clean = run(table_experience(junk=junk)), run(table_experience())
    tiny.close((grads, metrics), clean, 0.0)
    mask = table_experience().mask
    for tree in grads:
        assert (tree["table"][~mask] == 0).all()
        assert (tree["table"][mask] != 0).mean() > 0.5


# --- steps that must not be taken


def test_a_bad_step_leaves_no_trace(py, scored):
    """NaN for the critic alone: actor, critic, all moments stay; then all goes on."""
    exp, metrics = scored
    update = py.programs.update
    nan = exp.replace(returns=py.programs.put(exp.returns.at[0, 0].set(jnp.nan)))
    skipped, out = update(*py.trees(), nan, metrics)
    fresh, frozen = py.trees()
    kept = ("actor", "critic", "opt_actor", "opt_critic", "beta")
    for name in kept:
        assert tiny.distance(getattr(skipped, name), getattr(fresh, name)) == 0, name
    assert out["skipped"] == 2 and (out["steps/skipped"] == 1).all()
    assert np.isfinite(out["steps/grad_norm_actor"]).all()  # the actor's was good
    after, out = update(skipped, frozen, exp, metrics)
    never, _ = update(*py.trees(), exp, metrics)
    assert out["skipped"] == 0
    for name in kept:
        assert tiny.distance(getattr(after, name), getattr(never, name)) == 0, name
    assert tiny.distance(after.actor, py.trees()[0].actor) > 1e-3


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_gradient_skips_both_roles(role, bad):
    tx = make_optimizers(tiny.make_setup())
    tree = {"kernel": jnp.ones(3)}
    trees = (tree, tree, tx.actor.init(tree), tx.critic.init(tree))
    grads = [{"kernel": jnp.ones(3)}, {"kernel": jnp.ones(3)}]
    moved, metrics = ppo.apply_gradients(tx, trees, tuple(grads))
    assert metrics["skipped"] == 0 and tiny.distance(moved, trees) > 1e-3
    grads[role] = {"kernel": jnp.array([1.0, bad, 1.0])}
    kept, metrics = ppo.apply_gradients(tx, trees, tuple(grads))
    assert metrics["skipped"] == 1 and tiny.distance(kept, trees) == 0


# --- which tree a loss reaches


def test_value_loss_reaches_the_trunk_of_a_shared_critic_only(py, scored, gradients):
    """With advantages of 0, all of the actor's gradient is the value loss's."""
    state, _ = py.trees()
    exp = scored[0].replace(advantages=jnp.zeros((B, T)))
    (actor, critic), _ = gradients(py.setup, state.actor, state.critic, exp)
    assert all((g == 0).all() for g in jax.tree.leaves(actor))
    assert tiny.distance(critic, jax.tree.map(jnp.zeros_like, critic)) > 1e-3
    shared = tiny.make_setup({"critic.layout": "shared"})
    state, _ = tiny.first_trees(shared)
    assert set(state.critic) == {"head"}
    exp = exp.replace(critic_in=None)
    (actor, critic), _ = gradients(shared, state.actor, state.critic, exp)
    assert jnp.abs(actor["blocks"]["attn"]["q"]["kernel"][0]).max() > 1e-6
    assert jnp.abs(actor["embed"]["embedding"]).max() > 1e-4
    assert (actor["lm_head"]["kernel"] == 0).all()
    assert jnp.abs(critic["head"]["kernel"]).max() > 1e-4


def test_frozen_weights_are_not_in_the_state():
    """What is frozen has neither gradient nor moments: it is not there to change."""
    setup = tiny.make_setup(frozen=1)
    state, frozen = tiny.first_trees(setup)
    whole = tiny.params()
    for tree in (state.actor, state.critic):
        assert "embed" not in tree
        assert {a.shape[0] for a in jax.tree.leaves(tree["blocks"])} == {1}
    base = frozen.actor_base
    assert tiny.distance(base["embed"], whole["embed"]) == 0
    first = jax.tree.map(lambda a: a[:1], whole["blocks"])
    assert tiny.distance(base["blocks"], first) == 0
    moments = [a.size for a in jax.tree.leaves(state.opt_actor) if a.ndim]
    assert sum(moments) == 2 * sum(a.size for a in jax.tree.leaves(state.actor))
