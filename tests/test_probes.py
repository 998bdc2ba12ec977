"""Rewards that have one cause each: does PPO learn just that? A fault each.

All probes share one set of compiled programs: scores come from Python, and β is data.
Thresholds lie where the fault that is named cannot reach.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

RARE, OTHER = 9, 12  # tokens that the first policy has no liking for
ROWS = 64
SETTINGS = {
    "ppo.batch_size": ROWS,
    "sampling.max_new_tokens": 3,
    "sampling.temperature": 1.0,
    "actor_optim.lr": 5e-3,
}


@pytest.fixture(scope="module")
def learn():
    """learn(score(prompts, responses), steps, beta=0) → metrics of every step."""
    world = tiny.World(tiny.make_setup(SETTINGS))
    run = world.programs

    def train(score, steps, beta=0.0):
        state, frozen = world.trees()
        place = state.beta.sharding
        state = state.replace(beta=jax.device_put(jnp.float32(beta), place))
        history = []
        for step in range(steps):
            prompts = tiny.prompts(ROWS, seed=step)
            rolled = run.generate(state, frozen, run.put(prompts))
            mask = np.asarray(rolled.mask)
            said = np.where(mask, np.asarray(rolled.tokens)[:, tiny.P :], -1)
            scores = run.put(np.float32(score(np.asarray(prompts.tokens), said)))
            experience, metrics = run.score(state, frozen, rolled, scores)
            state, metrics = run.update(state, frozen, experience, metrics)
            history.append(jax.device_get(metrics))
        return history

    return train


def says_rare(_, said):
    return (said == RARE).any(-1)


@pytest.fixture(scope="module")
def free(learn):
    return learn(says_rare, 30)


def late(history, name):
    """Mean over the last five steps."""
    return float(np.mean([step[name] for step in history[-5:]]))


def test_critic_learns_a_constant_reward(learn):
    """Misses: no value gradient, a wrong sign, returns that are not the rewards."""
    history = learn(lambda _, said: np.full(len(said), 0.7), 20)
    assert abs(history[0]["values"] - 0.7) > 0.3
    assert abs(late(history, "values") - 0.7) < 0.03
    assert late(history, "value_loss") < 0.01


def test_policy_learns_one_token(free):
    """Misses: a wrong sign, log-probs of other tokens, a gradient of zero."""
    assert free[0]["scores"] < 0.3
    assert late(free, "scores") > 0.9


def test_policy_learns_to_look_at_the_prompt(learn):
    """The right token depends on the prompt; a policy blind to it gets half at most."""

    def score(prompts, said):
        return said[:, 0] == np.where(prompts[:, -1] < 10, RARE, OTHER)

    history = learn(score, 60)
    assert history[0]["scores"] < 0.3
    assert late(history, "scores") > 0.8


def test_credit_goes_back_to_the_first_token(learn):
    """The score comes with the last token and is earned by the first."""
    history = learn(lambda _, said: said[:, 0] == RARE, 30)
    assert history[0]["scores"] < 0.2
    assert late(history, "lengths") > 2  # so the two are not the same token
    assert late(history, "scores") > 0.9


def test_a_strong_leash_holds(learn, free):
    """β → ∞: the policy stays near the reference, whatever it is paid for."""
    held = learn(says_rare, 30, beta=20.0)
    assert late(free, "kl") > 5.0
    assert late(held, "kl") < 0.6  # the noise of one step's learning rate
    assert late(held, "scores") < 0.3
