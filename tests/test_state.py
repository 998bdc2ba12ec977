"""What a run starts from: learning rates, decay, and which trees are one tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jppo.config import OptimConfig
from jppo.models import transformer
from jppo.state import (
    abstract_policy,
    abstract_trees,
    init_state,
    init_trees,
    make_optimizer,
    make_optimizers,
    make_schedule,
)


def rates(total, **settings):
    schedule = make_schedule(OptimConfig(lr=0.8, **settings), total)
    return np.array([float(schedule(i)) for i in range(total)])


def test_constant():
    assert rates(5).tolist() == pytest.approx([0.8] * 5)


def test_linear_ends_one_step_above_0():
    """No step has a rate of 0, so none is wasted."""
    assert rates(4, schedule="linear").tolist() == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_cosine():
    assert rates(4, schedule="cosine").tolist() == pytest.approx(
        [0.8, 0.4 * (1 + 2**-0.5), 0.4, 0.4 * (1 - 2**-0.5)], abs=1e-6
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_to_the_peak_and_hands_over(schedule):
    found = rates(12, schedule=schedule, warmup=4)
    assert found[:4].tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[4:] == pytest.approx(rates(8, schedule=schedule))
    assert (found > 0).all()


def test_warm_up_of_one_step_and_of_the_whole_run():
    assert rates(3, warmup=1).tolist() == pytest.approx([0.8] * 3)
    assert rates(2, schedule="linear", warmup=4).tolist() == pytest.approx([0.2, 0.4])


def test_the_schedule_spans_all_optimizer_steps_of_the_run():
    """2 iterations × 2 epochs × 2 minibatches = 8 steps of Adam."""
    steps = {"run.steps": 2, "ppo.epochs": 2, "ppo.minibatches": 2}
    tx = make_optimizers(
        tiny.make_setup(
            steps | {"actor_optim.schedule": "linear", "actor_optim.lr": 0.8}
        )
    ).actor
    params = {"x": {"kernel": jnp.zeros(())}}
    state, sizes = tx.init(params), []
    for _ in range(9):
        updates, state = tx.update({"x": {"kernel": jnp.ones(())}}, state, params)
        sizes.append(-float(updates["x"]["kernel"]))
    assert sizes == pytest.approx([0.1 * k for k in range(8, -1, -1)], abs=1e-4)


def test_weight_decay_acts_on_matrices_only():
    """With a gradient of 0 an update is the decay alone: −lr · wd · param."""
    cfg = OptimConfig(lr=0.1, weight_decay=0.5)
    for params in (tiny.params(head=True), tiny.params()):
        params = jax.tree.map(np.ones_like, params)
        tx = make_optimizer(cfg, 10)
        zero = jax.tree.map(np.zeros_like, params)
        updates, _ = jax.jit(tx.update)(zero, tx.init(params), params)
        flat, _ = jax.tree_util.tree_flatten_with_path(updates)
        kinds = {path[-1].key for path, _ in flat}
        assert kinds - {"bias"} == {"embedding", "kernel", "scale"}
        for path, leaf in flat:
            expected = 0.0 if path[-1].key in ("scale", "bias") else -0.05
            np.testing.assert_allclose(leaf, expected, rtol=1e-6, err_msg=str(path))


def moments_after(norm, limit):
    tx = make_optimizer(OptimConfig(max_grad_norm=limit, b1=0.9), 10)
    params = {"a": {"kernel": jnp.zeros(2)}, "b": {"bias": jnp.zeros(2)}}
    grads = {"a": {"kernel": jnp.array([norm, 0.0])}, "b": {"bias": jnp.zeros(2)}}
    _, state = tx.update(grads, tx.init(params), params)
    return float(optax.tree.get(state, "mu")["a"]["kernel"][0]) / 0.1


def test_gradients_are_clipped_by_their_global_norm():
    assert moments_after(8.0, 2.0) == pytest.approx(2.0)
    assert moments_after(1.5, 2.0) == pytest.approx(1.5)
    assert moments_after(8.0, 0.0) == pytest.approx(8.0)  # 0 = off


def test_step_0():
    setup = tiny.make_setup({"kl.beta": 0.3})
    state, _ = tiny.first_trees(setup)
    assert (int(state.step), float(state.beta)) == (0, pytest.approx(0.3))
    for optimizer, params in (
        (state.opt_actor, state.actor),
        (state.opt_critic, state.critic),
    ):
        for moment in ("mu", "nu"):
            tree = optax.tree.get(optimizer, moment)
            assert jax.tree.structure(tree) == jax.tree.structure(params)
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


# Which trees are one tree


def same(a, b):
    """The very arrays, not copies: sharing is what saves the memory."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) > 0 and all(x is y for x, y in zip(a, b, strict=True))


def trees(setup, reward=False):
    policy, scorer = tiny.params(), tiny.params(seed=1, head=True) if reward else None
    return policy, scorer, *init_trees(setup, policy, scorer, jax.random.key(2))


def test_the_reference_is_the_first_actor():
    policy, _, actor, critic, frozen = trees(tiny.make_setup())
    assert same(frozen.reference, actor) and same(actor, policy)
    assert frozen.actor_base == frozen.critic_base == {}
    assert frozen.reward is None and frozen.reward_base is None
    for part in ("embed", "blocks", "norm"):
        assert same(critic[part], policy[part])
    assert set(critic) == {"embed", "blocks", "norm", "head"}
    assert np.any(critic["head"]["kernel"]) and not np.any(critic["head"]["bias"])


def test_a_critic_from_the_reward_model_shares_its_weights():
    setup = tiny.make_setup({"critic.init": "reward"}, reward=True, on_critic=True)
    policy, scorer, actor, critic, frozen = trees(setup, reward=True)
    assert same(critic, scorer) and same(frozen.reward, scorer) and same(actor, policy)
    assert frozen.reward_base is None  # it stands on the critic's


def test_a_critic_and_a_reward_model_on_one_trunk():
    setup = tiny.make_setup(
        {"critic.init": "reward"}, reward=True, frozen=1, on_critic=True
    )
    policy, scorer, actor, critic, frozen = trees(setup, reward=True)
    assert same(frozen.reward, critic) and frozen.reward_base is None
    tiny.close(transformer.merge_params(frozen.critic_base, frozen.reward), scorer, 0)
    assert same(frozen.reference, actor)
    tiny.close(transformer.merge_params(frozen.actor_base, actor), policy, 0)
    assert transformer.depth(frozen.critic_base) == transformer.depth(actor) == 1


def test_a_reward_model_beside_a_critic_from_the_policy():
    policy, scorer, _, critic, frozen = trees(tiny.make_setup(reward=True), reward=True)
    assert same(frozen.reward, scorer) and frozen.reward_base == {}
    assert same(critic["blocks"], policy["blocks"])


def test_a_shared_critic_is_a_head():
    setup = tiny.make_setup({"critic.layout": "shared"})
    _, _, _, critic, frozen = trees(setup)
    assert set(critic) == {"head"} and frozen.critic_base == {}
    assert critic["head"]["kernel"].shape == (tiny.CFG.d_model, 1)


@pytest.mark.parametrize(
    "setup",
    [
        tiny.make_setup(),
        tiny.make_setup(cfg=tiny.TIED),
        tiny.make_setup(reward=True),
        tiny.make_setup({"critic.layout": "shared"}, reward=True),
        tiny.make_setup(
            {"critic.init": "reward"}, reward=True, frozen=1, on_critic=True
        ),
    ],
    ids=["python", "tied", "reward", "shared", "trunks"],
)
def test_the_abstract_trees_are_those_of_a_run(setup):
    """Shapes from which shardings and checkpoints derive: the real ones, no others."""
    policy = tiny.params(setup.actor)
    scorer = tiny.params(seed=1, head=True) if setup.reward else None
    actor, critic, frozen = init_trees(setup, policy, scorer, jax.random.key(2))
    real = init_state(setup, actor, critic, jax.random.key(3)), frozen
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), real)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), abstract_trees(setup))
    whole = jax.tree.map(lambda a: a.shape, abstract_policy(setup))
    assert whole == jax.tree.map(lambda a: a.shape, policy)
