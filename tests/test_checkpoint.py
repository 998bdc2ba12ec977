"""A checkpoint holds everything, exactly, and refuses to serve another model."""

import jax
import numpy as np
import pytest
import tiny

from jppo.checkpoint import CheckpointError, Checkpoints, identity
from jppo.sharding import make_mesh

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def plain(state):
    return jax.device_get(state.replace(key=jax.random.key_data(state.key)))


@pytest.fixture(scope="module")
def trained(rm):
    state, frozen = rm.trees()
    state, _, _ = rm.programs.iteration(state, frozen, rm.prompts())
    return state, frozen


@pytest.fixture(scope="module")
def saved(rm, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    store = Checkpoints(folder, keep=2)
    meta = {"cursor": 24, "identity": identity(rm.setup, trained[1])}
    for step in (1, 2, 3):
        store.save(trained[0].replace(step=np.int32(step)), meta)
    store.close()
    return folder


@pytest.fixture
def store(saved):
    store = Checkpoints(saved)
    yield store
    store.close()


def test_the_last_two_are_kept(store):
    assert store.latest() == 3
    with pytest.raises(CheckpointError, match=r"no checkpoint 1, have \[2, 3\]"):
        store.restore(None, {}, step=1)


def test_whole_state_comes_back_bit_for_bit(rm, trained, store):
    like, frozen = rm.trees()
    state, meta = store.restore(like, identity(rm.setup, frozen))
    expected = plain(trained[0].replace(step=np.int32(3)))
    jax.tree.map(np.testing.assert_array_equal, plain(state), expected)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert meta["cursor"] == 24
    assert tiny.distance(plain(state).opt_actor, plain(like).opt_actor) > 0


def test_restores_onto_another_mesh(rm, trained, store):
    world = tiny.World(rm.setup, make_mesh({"fsdp": 4, "data": 2}))
    like, frozen = world.trees()
    state, _ = store.restore(like, identity(world.setup, frozen))
    expected = plain(trained[0].replace(step=np.int32(3)))
    jax.tree.map(np.testing.assert_array_equal, plain(state), expected)
    leaf = state.actor["blocks"]["mlp"]["up"]["kernel"]
    assert len(leaf.sharding.device_set) == 8


@pytest.mark.parametrize(
    "change, says",
    [
        ({"actor.d_model": 99}, "actor.d_model is 16 there, 99 here"),
        ({"reference_weights": "0"}, "reference_weights is .* there, 0 here"),
        ({"actor_frozen": 1}, "actor_frozen is None there, 1 here"),
    ],
)
def test_another_model_is_refused(rm, store, change, says):
    like, frozen = rm.trees()
    who = identity(rm.setup, frozen)
    for name, value in change.items():
        *path, last = name.split(".")
        part = who
        for key in path:
            part = part[key]
        part[last] = value
    with pytest.raises(CheckpointError, match=f"belongs to another model: {says}"):
        store.restore(like, who)


def test_fingerprint_sees_other_weights(rm):
    _, frozen = rm.trees()
    _, other = rm.trees(reference=tiny.params(seed=5))
    mine, theirs = identity(rm.setup, frozen), identity(rm.setup, other)
    assert mine["reference_weights"] != theirs["reference_weights"]
    assert mine["actor"] == theirs["actor"]
