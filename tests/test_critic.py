"""The critic: where it starts, how it warms up, and what it is as a model."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from jppo import settings
from jppo.config import ConfigError
from jppo.models import transformer as tf
from jppo.models.hf import load_hf, save_hf
from jppo.state import init_trees, make_optimizers, whole_critic, whole_policy

WARM = {"critic.warmup": 2, "run.steps": 4, "kl.controller": "ziegler"}


@pytest.fixture(scope="module")
def world():
    return tiny.World(tiny.make_setup(WARM, reward=True))


def test_only_the_critic_moves_while_it_warms_up(world):
    """Bit for bit: actor, its moments and β stay for two iterations, then all move."""
    state, frozen = world.trees()
    first = jax.device_get(dataclasses.replace(state, key=0))
    for step in (1, 2, 3):
        state, metrics, _ = world.programs.iteration(state, frozen, world.prompts(step))
        now = jax.device_get(dataclasses.replace(state, key=0))
        names = ("actor", "opt_actor", "beta")
        moved = [tiny.distance(getattr(now, k), getattr(first, k)) for k in names]
        assert all(x == 0 for x in moved) if step <= 2 else all(x > 0 for x in moved)
        assert tiny.distance(now.critic, first.critic) > 0
        assert metrics["grad_norm_actor"] > 0 and metrics["kl"] == 0
    assert world.programs.iteration.cache_size() == 1  # one program for both phases


def test_the_actors_schedule_begins_when_it_does():
    setup = tiny.make_setup(WARM | {"actor_optim.schedule": "linear"})
    tx = make_optimizers(setup).actor
    params = {"w": {"kernel": np.ones((2, 2), np.float32)}}
    state, steps = tx.init(params), 2 * 2  # iterations × epochs after the warm-up
    sizes = []
    for _ in range(steps + 1):
        updates, state = tx.update(params, state, params)
        sizes.append(float(np.abs(updates["w"]["kernel"]).max()))
    assert sizes[0] == pytest.approx(1e-2, rel=1e-3) and sizes[-1] == 0 < sizes[-2]


def test_a_critic_from_scratch_owes_nothing_to_the_policy():
    setup = tiny.make_setup({"critic.init": "scratch"}, reward=True)
    policy = tiny.params()
    args = setup, policy, tiny.params(seed=1, head=True)
    critic = init_trees(*args, jax.random.key(0))[1]
    assert jax.tree.structure(critic) == jax.tree.structure(tiny.params(head=True))
    assert tiny.distance(critic["blocks"], policy["blocks"]) > 0.1
    other = init_trees(*args, jax.random.key(1))[1]
    assert tiny.distance(critic, other) > 0
    world = tiny.World(setup)
    state, frozen = world.trees()
    state, metrics, _ = world.programs.iteration(state, frozen, world.prompts())
    assert np.isfinite(metrics["value_loss"])


@pytest.mark.parametrize(
    "over, says",
    [
        ({"critic.warmup": 100}, "critic.warmup is 100: it must lie between 0 and"),
        ({"critic.warmup": -1}, "critic.warmup is -1"),
        (
            {"critic.init": "scratch", "critic.layout": "shared"},
            "critic.init=scratch needs critic.layout=separate",
        ),
        (
            {"critic.init": "scratch", "critic.train_layers": 1},
            "critic.init=scratch needs critic.train_layers=null",
        ),
        (
            {"critic.init": "scratch", "critic.lora.rank": 1},
            "fresh weights must learn",
        ),
    ],
)
def test_what_cannot_be(over, says):
    with pytest.raises(ConfigError, match=says):
        settings.from_dict(over)


LAYOUTS = {
    "separate": ({}, {}),
    "shared": ({"critic.layout": "shared"}, {}),
    "trunk": ({}, {"frozen": 1}),
    "adapter": ({"critic.lora.rank": 2, "policy.lora.rank": 2}, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_critic_is_saved_and_read_to_equal_values(name, tmp_path):
    """Whatever it shares while it learns, it leaves as a model with one label."""
    over, how = LAYOUTS[name]
    setup = tiny.make_setup(over, **how)
    state, frozen = tiny.first_trees(setup)
    noise = lambda a: a + 0.1 * jax.random.normal(jax.random.key(a.size), a.shape)  # noqa: E731
    state = dataclasses.replace(state, actor=jax.tree.map(noise, state.actor))
    kernel = noise(state.critic["head"]["kernel"])
    head = {"kernel": kernel, "bias": kernel[0]}
    state = dataclasses.replace(state, critic=state.critic | {"head": head})
    whole = whole_critic(setup, state, frozen)
    save_hf(tmp_path / "critic", setup.critic, whole)
    cfg, back = load_hf(tmp_path / "critic")
    tokens = tiny.prompts().tokens
    valid = tiny.prompts().mask
    values = [
        tf.scalar_head(tree, tf.hidden_states(c, tree, tokens, valid))
        for c, tree in ((setup.critic, whole), (cfg, back))
    ]
    np.testing.assert_allclose(values[0], values[1], atol=1e-5)
    if name == "shared":
        policy = whole_policy(state, frozen)
        hidden = tf.hidden_states(setup.actor, policy, tokens, valid)
        mine = tf.scalar_head(state.critic, hidden)
        np.testing.assert_allclose(values[1], mine, atol=1e-5)
