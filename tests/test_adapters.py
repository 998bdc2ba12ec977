"""PPO on adapters: four roles over one base, of which only factors and heads learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jppo.models import lora
from jppo.sharding import make_mesh
from jppo.state import abstract_trees, init_trees

LORA = {
    "policy.lora.rank": 2,
    "policy.lora.alpha": 4.0,
    "critic.lora.rank": 3,
    "critic.lora.targets": "mlp/",
}
CFG = dataclasses.replace(tiny.CFG, lora_scale=2.0)


def paths(tree):
    return set(lora.flatten(tree))


@pytest.fixture(scope="module")
def world():
    return tiny.World(tiny.make_setup(LORA, cfg=CFG, reward=True))


@pytest.fixture(scope="module")
def after(world):
    """The first state, the frozen trees, and two iterations later."""
    first, frozen_first = tiny.first_trees(world.setup)
    first = jax.tree.map(jnp.copy, first)
    state, frozen = world.programs.place(first, frozen_first)
    metrics = []
    for seed in range(2):
        state, found, _ = world.programs.iteration(state, frozen, world.prompts(seed))
        metrics.append(jax.device_get(found))
    return first, frozen, state, metrics


def test_only_factors_and_head_learn(after):
    first, frozen, state, _ = after
    assert all(lora.is_factor(path) for path in paths(state.actor))
    heads = {path for path in paths(state.critic) if not lora.is_factor(path)}
    assert heads == {"head/kernel", "head/bias"}
    assert {p.split("/")[1] for p in paths(state.critic) if "head" not in p} == {"mlp"}
    moved = jax.tree.map(tiny.distance, first.actor, state.actor)
    assert all(d > 1e-4 for d in jax.tree.leaves(moved))
    assert tiny.distance(first.critic, state.critic) > 1e-4
    assert tiny.distance(frozen.reference, tiny.params(CFG)) == 0


def test_reference_is_the_policy_with_the_adapter_off(after):
    """KL 0 and ratio 1 before the first update, at any temperature; then it moves."""
    *_, (before, later) = after
    assert abs(before["kl"]) < 1e-6
    assert abs(later["kl"]) > 1e-3


def test_one_base_for_all(world):
    """Actor, reference and critic hold the same arrays, before and after placing."""
    setup = tiny.make_setup(LORA, cfg=CFG)
    policy = tiny.params(CFG)
    actor, critic, frozen = init_trees(setup, policy, None, jax.random.key(0))
    run = tiny.World(setup).programs
    placed, where = run.place(*tiny.first_trees(setup))
    for under, reference in (
        (frozen.critic_under, frozen.reference),
        (where.critic_under, where.reference),
    ):
        shared = lora.flatten(under)
        base = lora.flatten(reference)
        assert shared.keys() == base.keys() - {"lm_head/kernel"}
        assert all(leaf is base[path] for path, leaf in shared.items())
    trained = sum(x.size for x in jax.tree.leaves((actor, critic)))
    assert trained < 0.6 * sum(x.size for x in jax.tree.leaves(policy))
    assert all(lora.is_factor(path) for path in paths(placed.actor))


def test_shapes_are_known_before(world):
    real = tiny.first_trees(world.setup)
    form = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)  # noqa: E731
    assert form(abstract_trees(world.setup)) == form(real)


def test_a_critic_goes_on_from_the_adapter_of_its_reward_model():
    over = LORA | {"critic.init": "reward"}
    setup = tiny.make_setup(over, cfg=CFG, reward=True, on_critic=True)
    base = tiny.params(CFG, 1, head=True)
    fresh = lora.init_adapter(base, jax.random.key(1), rank=3, targets="attn/")
    factors = jax.tree.map(lambda a: a + 0.1, fresh)
    reward = lora.overlay(base, factors)
    _, critic, frozen = init_trees(setup, tiny.params(CFG), reward, jax.random.key(2))
    assert tiny.distance(lora.split_adapter(critic)[1], factors) == 0
    assert paths(frozen.reward) == paths(reward)
    whole = lora.overlay(frozen.critic_under, critic)
    assert tiny.distance(whole, reward) == 0


def test_a_mesh_changes_nothing():
    def run(mesh):
        world = tiny.World(tiny.make_setup(LORA | tiny.CALM, cfg=CFG), mesh)
        state, frozen = world.trees()
        rolled = world.programs.generate(state, frozen, world.prompts())
        made, scored = world.programs.score(state, frozen, rolled, world.scores())
        state, _ = world.programs.update(state, frozen, made, scored)
        return jax.device_get((state.actor, state.critic))

    tiny.close(run(make_mesh({"fsdp": 4, "tensor": 2})), run(tiny.one_device()))


def test_frozen_matrices_are_kept_in_the_compute_dtype():
    """Half the bytes for nothing: every product casts them anyway."""
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    setup = tiny.make_setup(LORA, cfg=cfg, reward=True)
    state, frozen = tiny.first_trees(setup)
    dtypes = {path: leaf.dtype for path, leaf in lora.flatten(frozen.reward).items()}
    assert dtypes["blocks/mlp/up/kernel"] == jnp.bfloat16
    assert dtypes["blocks/mlp_norm/scale"] == dtypes["head/kernel"] == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state.actor)} == {jnp.dtype("float32")}
    world = tiny.World(setup)
    rolled = world.programs.generate(*world.trees(), world.prompts())
    kept, _ = world.programs.score(*world.trees(), rolled)
    np.testing.assert_allclose(kept.logp_old, kept.logp_ref, atol=1e-6)
