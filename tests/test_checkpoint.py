"""Checkpoints: every bit of the state comes back, and only to the run it belongs to."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jppo.checkpoint import CheckpointError, Checkpoints, identity
from jppo.sharding import make_mesh, tree_shardings
from jppo.state import abstract_trees

SETUP = tiny.make_setup({"kl.controller": "ziegler"})
TRUNKS = tiny.make_setup(
    {"critic.init": "reward"}, reward=True, frozen=1, on_critic=True
)


def noisy(setup, step=3, seed=0):
    """A state in the midst of training: no leaf is at its start value."""
    state, frozen = tiny.first_trees(setup)
    rng = np.random.default_rng(seed)

    def noise(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf + 7
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    state = jax.tree.map(noise, state)
    key = jax.random.fold_in(jax.random.key(11), step)
    return state.replace(step=jnp.int32(step), key=key), frozen


def bits(state):
    """Path, dtype and bytes of each leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        state.replace(key=jax.random.key_data(state.key))
    )
    return {
        jax.tree_util.keystr(path): (leaf.dtype, np.asarray(leaf).tobytes())
        for path, leaf in flat
    }


@pytest.fixture
def store(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints")
    yield store
    store.close()


def test_every_bit_of_the_state_comes_back(store, tmp_path):
    state, frozen = noisy(SETUP)
    who = identity(SETUP, frozen)
    store.save(state, {"cursor": 24, "identity": who})
    store.close()
    again = Checkpoints(tmp_path / "checkpoints")  # as another process would
    like, _ = tiny.first_trees(SETUP)
    back, meta = again.restore(like, who)
    again.close()
    assert bits(back) == bits(state) != bits(like)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert meta["cursor"] == 24
    paths = " ".join(bits(back))
    for part in ("opt_actor", "opt_critic", ".mu", ".nu", ".count", "beta", "step"):
        assert part in paths
    assert jnp.issubdtype(back.key.dtype, jax.dtypes.prng_key)
    draw = lambda key: jax.random.normal(key, (4,)).tolist()  # noqa: E731
    assert draw(back.key) == draw(state.key) != draw(like.key)


@pytest.mark.parametrize("devices", [8, 1])
def test_a_state_moves_to_another_mesh(store, devices):
    """Written by 1 device and read by 8, and the other way round."""
    sizes = {
        1: make_mesh({}, jax.devices()[:1]),
        8: make_mesh({"fsdp": 4, "tensor": 2}),
    }
    abstract, _ = abstract_trees(SETUP)
    there, here = (tree_shardings(abstract, sizes[n]) for n in (9 - devices, devices))
    state, frozen = noisy(SETUP)
    who = identity(SETUP, frozen)
    store.save(jax.device_put(state, there), {"cursor": 0, "identity": who})
    like = jax.device_put(tiny.first_trees(SETUP)[0], here)
    back, _ = store.restore(like, who)
    assert bits(back) == bits(state)
    for leaf, place in zip(jax.tree.leaves(back), jax.tree.leaves(here), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    kernel = back.actor["blocks"]["attn"]["q"]["kernel"]
    assert len(kernel.sharding.device_set) == devices


def test_training_goes_on_while_a_checkpoint_is_written(store):
    """The update donates the state that was just handed over."""

    def move(leaf):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.split(leaf)[0] if key else leaf + jnp.ones_like(leaf)

    update = jax.jit(lambda state: jax.tree.map(move, state), donate_argnums=0)
    state, frozen = noisy(SETUP)
    like, before, who = noisy(SETUP)[0], bits(state), identity(SETUP, frozen)
    store.save(state, {"cursor": 0, "identity": who})
    for _ in range(3):
        state = update(state)
    back, _ = store.restore(like, who)
    assert bits(back) == before != bits(state)


def test_the_last_two_are_kept(store):
    state, frozen = noisy(SETUP)
    who = identity(SETUP, frozen)
    assert store.latest() is None
    for step in (2, 4, 6):
        new, _ = noisy(SETUP, step, seed=step)
        store.save(new, {"cursor": 8 * step, "identity": who})
    assert store.latest() == 6
    newest, meta = store.restore(state, who)
    assert (int(newest.step), meta["cursor"]) == (6, 48)
    older, meta = store.restore(state, who, 4)
    assert bits(older) == bits(noisy(SETUP, 4, seed=4)[0]) and meta["cursor"] == 32
    with pytest.raises(CheckpointError, match=r"no checkpoint 2, have \[4, 6\]"):
        store.restore(state, who, 2)
    names = {p.name for p in store.folder.iterdir() if p.name.isdigit()}
    assert names == {"4", "6"}


def test_a_step_is_written_once(store):
    first, frozen = noisy(SETUP)
    who = identity(SETUP, frozen)
    store.save(first, {"cursor": 1, "identity": who})
    store.save(noisy(SETUP, seed=5)[0], {"cursor": 2, "identity": who})
    back, meta = store.restore(first, who)
    assert bits(back) == bits(first) and meta["cursor"] == 1


def test_a_missing_step_is_an_error(store):
    state, frozen = noisy(SETUP)
    who = identity(SETUP, frozen)
    for step in (None, 7):
        with pytest.raises(CheckpointError, match=rf"no checkpoint {step}, have \[\]"):
            store.restore(state, who, step)


OTHERS = {
    "actor.d_mlp": {"actor": dataclasses.replace(tiny.CFG, d_mlp=64)},
    "actor.rope_theta": {"actor": dataclasses.replace(tiny.CFG, rope_theta=5e5)},
    "critic.n_layers": {"critic": dataclasses.replace(tiny.CFG, n_layers=3)},
    "critic_layout": {"config": tiny.make_setup({"critic.layout": "shared"}).config},
    "actor_frozen": {"actor_frozen": 1},
    "critic_frozen": {"critic_frozen": 1},
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_model_is_named_with_both_values(store, field):
    state, frozen = noisy(SETUP)
    who = identity(SETUP, frozen)
    store.save(state, {"cursor": 0, "identity": who})
    asks = identity(dataclasses.replace(SETUP, **OTHERS[field]), frozen)
    with pytest.raises(CheckpointError, match="another model") as caught:
        store.restore(state, asks)

    def at(tree):
        for part in field.split("."):
            tree = tree[part]
        return re.escape(str(tree))

    assert re.search(
        rf"{field} is {at(who)} there, {at(asks)} here", str(caught.value)
    ), caught.value
    assert "\n" not in str(caught.value)


def test_how_a_model_is_computed_may_change():
    """Resume on other hardware: dtype, remat and unroll are no part of a model."""
    _, frozen = noisy(SETUP)
    actor = dataclasses.replace(
        tiny.CFG, dtype="bfloat16", remat=True, unroll=2, max_positions=32
    )
    asks = dataclasses.replace(SETUP, actor=actor, critic=actor)
    assert identity(asks, frozen) == identity(SETUP, frozen)


def changed(tree, *path):
    """A copy of nested dicts with one weight of one leaf moved."""
    if not path:
        return tree.at[(0,) * tree.ndim].add(1e-3)
    return tree | {path[0]: changed(tree[path[0]], *path[1:])}


@pytest.mark.parametrize(
    ("field", "tree", "path"),
    [
        ("reference_weights", "reference", ("norm", "scale")),
        ("reference_weights", "actor_base", ("embed", "embedding")),
        ("reward_weights", "reward", ("head", "bias")),
        ("reward_weights", "critic_base", ("blocks", "attn", "q", "kernel")),
    ],
)
def test_other_frozen_weights_are_noticed(store, field, tree, path):
    """They are not in the checkpoint; with others the run would be another run."""
    state, frozen = noisy(TRUNKS)
    who = identity(TRUNKS, frozen)
    store.save(state, {"cursor": 0, "identity": who})
    store.restore(state, who)
    other = dataclasses.replace(frozen, **{tree: changed(getattr(frozen, tree), *path)})
    with pytest.raises(CheckpointError, match=f"{field} is"):
        store.restore(state, identity(TRUNKS, other))


def test_the_fingerprint_does_not_depend_on_the_mesh():
    _, frozen = tiny.first_trees(TRUNKS)
    _, places = tree_shardings(
        abstract_trees(TRUNKS), make_mesh({"fsdp": 4, "tensor": 2})
    )
    assert identity(TRUNKS, jax.device_put(frozen, places)) == identity(TRUNKS, frozen)
    host = jax.device_get(frozen)
    assert identity(TRUNKS, host) == identity(TRUNKS, frozen)
