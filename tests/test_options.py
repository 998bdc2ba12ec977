"""Every option of the algorithm does what it says: none is read and never used.

The networks are replaced by tables of numbers, so a program costs next to nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from option_tables import (
    ELSEWHERE,
    LOSS,
    OPTIM,
    SAMPLING,
    SCORING,
    SECTIONS,
    change_of,
)

from jppo import decode, ppo, rollout, settings
from jppo.state import init_state, make_optimizers
from jppo.types import Experience, Rollout

B, P, T = tiny.B, tiny.P, tiny.T
NO_TREES = tiny.NO_TREES
LENGTHS = [5, 3, 1, 5, 2, 0, 4, 5]
MASK = np.arange(T) < np.array(LENGTHS)[:, None]


def test_the_tables_are_complete():
    """A new option must come with a test in which it changes a number."""
    known = {key for key in settings.keys() if key.split(".")[0] in SECTIONS}
    tested = {k.split(" ")[0] for t in (SAMPLING, SCORING, LOSS, ELSEWHERE) for k in t}
    for role in ("actor_optim.", "critic_optim."):
        tested |= {role + key.split(" ")[0] for key in OPTIM}
    assert tested == known


# --- scoring: against plain numpy


@pytest.fixture
def roles(monkeypatch):
    """Outputs of all roles as fixed numbers, in place of the forward passes."""
    rng = np.random.default_rng(0)
    logp, ref = -np.abs(rng.normal(size=(2, B, T))).astype(np.float32)
    values, entropy = rng.normal(size=(2, B, T)).astype(np.float32)
    given = dict(logp=logp, logp_ref=ref, values=values, entropy=entropy)
    given |= {"actor_in": np.zeros((B, P + T), np.float32), "critic_in": None}
    fake = lambda *_: jax.tree.map(jnp.asarray, given)  # noqa: E731
    monkeypatch.setattr(rollout, "forward_roles", fake)
    return given


@pytest.fixture
def rolled(roles):
    noise = 0.1 * np.random.default_rng(1).normal(size=(B, T))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    return Rollout(
        tokens=jnp.zeros((B, P + T), jnp.int32),
        valid=jnp.ones((B, P + T), bool),
        mask=jnp.asarray(MASK),
        logp=jnp.asarray(np.where(MASK, roles["logp"] + noise, 0.0), jnp.float32),
        stopped=(0 < lengths) & (lengths < T) | (jnp.arange(B) == 3),
        stop_index=jnp.zeros(B, jnp.int32),
        lengths=lengths,
    )


def score(change, rolled):
    setup = tiny.make_setup(change)
    state = init_state(setup, {}, {}, jax.random.key(0))
    return rollout.score(setup, state, NO_TREES, rolled, tiny.scores())


def by_numpy(change, roles, rolled):
    cfg = tiny.make_setup(change).config
    stopped = np.asarray(rolled.stopped)
    return reference.experience(
        cfg, roles, rolled.logp, tiny.scores(), MASK, stopped, cfg.kl.beta
    )


@pytest.mark.parametrize("name", ["nothing", *SCORING])
def test_scoring_options_against_numpy(roles, rolled, name):
    change = change_of(SCORING, name)
    experience, metrics = score(change, rolled)
    expected, fields = by_numpy(change, roles, rolled)
    assert set(metrics) == set(expected)
    for key, value in expected.items():
        got = metrics[key]
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5, err_msg=key)
    for key, value in fields.items():
        got, value = (np.where(MASK, x, 0.0) for x in (getattr(experience, key), value))
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5, err_msg=key)
    moved = tiny.distance(by_numpy({}, roles, rolled), (expected, fields))
    assert (moved > 1e-3) == (name != "nothing")


def test_row_without_response_is_in_no_number(rolled):
    experience, _ = score({}, rolled)
    for name in ("logp_old", "logp_ref", "values_old", "advantages", "returns"):
        assert (getattr(experience, name)[LENGTHS.index(0)] == 0).all(), name


def test_score_lands_on_the_last_valid_token(roles, rolled):
    """λ = 0, V = 0, β = 0: the advantage is the reward of the token itself."""
    roles["values"] = np.zeros((B, T), np.float32)
    only = {"ppo.lam": 0.0, "kl.beta": 0.0, "ppo.whiten_advantages": False}
    experience, _ = score(only, rolled)
    expected = np.zeros((B, T), np.float32)
    for b, length in enumerate(LENGTHS):
        if length:
            expected[b, length - 1] = tiny.scores()[b]
    np.testing.assert_allclose(experience.advantages, expected, atol=1e-7)


# --- the update


def experience():
    rng = np.random.default_rng(2)
    draws = rng.normal(size=(6, B, T)).astype(np.float32)
    logp, ref, values, advantages, returns, weights = map(jnp.asarray, draws)
    rows = jnp.arange(B)
    return Experience(
        actor_in=rows,
        critic_in=rows,
        tokens=jnp.zeros((B, T), jnp.int32),
        valid=jnp.ones((B, P + T), bool),
        mask=jnp.asarray(MASK),
        logp_old=logp,
        logp_ref=ref,
        values_old=values,
        advantages=advantages,
        returns=returns,
        weights=jnp.exp(0.1 * weights),
        scores=jnp.zeros(B),
    )


def gradients(change, beta=0.2):
    """((actor, critic) gradients, metrics) of tables off the old policy."""
    setup, exp = tiny.make_setup(change), experience()
    tables = {"table": exp.logp_old + 0.3}, {"table": exp.values_old + 0.3}
    return ppo.minibatch_gradients(setup, tables, NO_TREES, exp, jnp.float32(beta))


@pytest.fixture
def tables(monkeypatch):
    tiny.use_tables(monkeypatch)


@pytest.mark.parametrize("name", LOSS)
def test_loss_options_change_the_gradient(tables, name):
    """And of no role that they do not concern."""
    (actor, critic), _ = gradients(change_of(LOSS, name))
    (actor_base, critic_base), _ = gradients({})
    moved = tiny.distance(actor, actor_base), tiny.distance(critic, critic_base)
    both = name.startswith("ppo.aggregation")
    of_critic = name.startswith("ppo.value")
    assert (moved[0] > 1e-3) == (both or not of_critic)
    assert (moved[1] > 1e-3) == (both or of_critic)


def test_beta_weighs_the_kl_in_the_loss_only(tables):
    inside = {"kl.where": "loss"}
    assert tiny.distance(gradients(inside, 0.2), gradients(inside, 0.4)) > 1e-3
    assert tiny.distance(gradients({}, 0.2), gradients({}, 0.4)) == 0.0
    off, _ = gradients(inside, 0.0)
    assert tiny.distance(off, gradients({})[0]) == 0.0


def test_bonus_and_leash_pull_the_right_way(tables):
    """−c₂ ∂S/∂lp, with S = 2 − lp here, and β (lp − lpr): both a mean over tokens."""
    exp, n = experience(), MASK.sum()
    (base, _), _ = gradients({})

    def added(change):
        (actor, _), _ = gradients(change, 0.2)
        return actor["table"] - base["table"]

    bonus = np.where(MASK, 0.3 / n, 0.0)
    leash = np.where(MASK, 0.2 * (exp.logp_old + 0.3 - exp.logp_ref) / n, 0.0)
    np.testing.assert_allclose(added({"ppo.entropy_coef": 0.3}), bonus, atol=1e-7)
    np.testing.assert_allclose(added({"kl.where": "loss"}), leash, atol=1e-7)


def three_steps(change):
    """Both roles' weights after three optimizer steps of one made-up gradient."""
    setup = tiny.make_setup({"run.steps": 2} | change)
    tx = make_optimizers(setup)
    tree = {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.array([0.5])}
    state = init_state(setup, tree, tree, jax.random.key(0))
    trees = state.actor, state.critic, state.opt_actor, state.opt_critic
    for scale in (1.0, 3.0, -0.5):
        grads = jax.tree.map(lambda x, scale=scale: 0.1 * scale * x, tree)
        trees, _ = ppo.apply_gradients(tx, trees, (grads, grads))
    return {"actor": trees[0], "critic": trees[1]}


@pytest.mark.parametrize("role, other", [("actor", "critic"), ("critic", "actor")])
@pytest.mark.parametrize("name", OPTIM)
def test_optimizer_options_move_their_role_only(role, other, name):
    change = {k.split(".")[-1]: v for k, v in change_of(OPTIM, name).items()}
    out = three_steps({f"{role}_optim.{k}": v for k, v in change.items()})
    base = three_steps({})
    assert tiny.distance(out[role], base[role]) > 1e-4
    assert tiny.distance(out[other], base[other]) == 0.0


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, 0.2),
        ({"kl.controller": "paper"}, 0.4),
        ({"kl.controller": "paper", "kl.target": 15.0}, 0.2),
        ({"kl.controller": "paper", "kl.target": 40.0}, 0.1),
        ({"kl.controller": "ziegler", "kl.horizon": 100.0}, 0.2 * (1 + 0.2 * 8 / 100)),
        ({"kl.controller": "ziegler", "kl.target": 19.0}, 0.2 * (1 + 8e-4 / 19)),
        ({"kl.controller": "ziegler", "kl.target": 20.0}, 0.2),
        ({"kl.controller": "ziegler", "kl.target": 80.0}, 0.2 * (1 - 0.2 * 8e-4)),
    ],
)
def test_controllers_of_beta(change, expected):
    """KL 20 over 8 sequences, β .2, target 6, horizon 10 000."""
    setup = tiny.make_setup(change)
    kl, n = jnp.float32(20.0), jnp.float32(8.0)
    beta = ppo.next_beta(setup, jnp.float32(0.2), kl, n)
    np.testing.assert_allclose(beta, expected, rtol=1e-6)


# --- sampling


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_options_change_the_draw(name):
    """Tokens differ, and log-probs are of the temperature, not of the cut."""
    rows = 64
    hidden = jax.random.normal(jax.random.key(0), (rows, tiny.CFG.d_model))
    keys = jax.random.split(jax.random.key(1), rows)
    head = tiny.params()["lm_head"]["kernel"], False

    def draw(change):
        sampling = tiny.make_setup(change).config.sampling
        return decode.draw(hidden, head, keys, 0, sampling)

    (tokens, logp), (base, base_logp) = draw(change_of(SAMPLING, name)), draw({})
    same = np.asarray(tokens == base)
    assert same.any() and not same.all()
    moved = np.abs(logp - base_logp)[same].max() > 1e-3
    assert moved == (name == "sampling.temperature")


def test_setups_are_jit_keys():
    """Equal configs are one compilation, different ones are two."""
    a, b = tiny.make_setup(), tiny.make_setup()
    assert a == b and hash(a) == hash(b)
    for table in (SAMPLING, SCORING, LOSS):
        for name in table:
            other = tiny.make_setup(change_of(table, name))
            assert other != a
    assert dataclasses.replace(a, pad_id=0) != a
