"""Where and how a run is computed changes nothing: meshes, parts, padding of prompts.

Each run is three whole iterations, from generation to the update, with fixed keys.
"""

import jax
import numpy as np
import pytest
import tiny

from jppo.sharding import make_mesh

slow = pytest.mark.slow
RUNS = [  # mesh, settings
    pytest.param({"data": 8}, {}, id="data=8", marks=slow),
    pytest.param({"fsdp": 8}, {}, id="fsdp=8", marks=slow),
    pytest.param({"fsdp": 4, "tensor": 2}, {}, id="fsdp=4 tensor=2", marks=slow),
    # 4 query heads and 2 of keys and values do not divide: they stay whole
    pytest.param({"tensor": 8}, {}, id="tensor=8", marks=slow),
    pytest.param({"fsdp": 2, "tensor": 4}, {}, id="fsdp=2 tensor=4"),
    pytest.param(
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"ppo.micro_batches": 2},
        id="data=2 fsdp=2 tensor=2, in parts",
    ),
]


def three_iterations(world, **kwargs):
    """(last actor, critic and β; metrics and responses of every iteration)."""
    state, frozen = world.trees()
    history, said = [], []
    for step in range(3):
        prompts = world.programs.put(tiny.prompts(seed=step, **kwargs))
        state, metrics, rolled = world.programs.iteration(state, frozen, prompts)
        history.append(jax.device_get(metrics))
        said.append(np.asarray(rolled.tokens)[:, -tiny.T :])
    return jax.device_get((state.actor, state.critic, state.beta)), history, said


@pytest.fixture(scope="module")
def alone(rm):
    """On one device."""
    return three_iterations(rm)


def same(run, expected):
    np.testing.assert_array_equal(run[2], expected[2])
    tiny.close(run[0], expected[0], 1e-5)
    tiny.close(run[1], expected[1], 1e-4)


def test_the_run_does_something(rm, alone):
    """Else all that follows would be true of a program that does nothing."""
    (actor, critic, beta), history, said = alone
    first, _ = rm.trees()
    assert tiny.distance((actor, critic), (first.actor, first.critic)) > 1e-2
    assert beta != first.beta and history[1]["kl"] != 0
    assert len({x.tobytes() for x in said}) == 3


@pytest.mark.parametrize("mesh, over", RUNS)
def test_a_mesh_changes_nothing(alone, mesh, over):
    setup = tiny.make_setup(tiny.CALM | over, reward=True)
    same(three_iterations(tiny.World(setup, make_mesh(mesh))), alone)


def test_padding_of_prompts_changes_nothing(rm):
    """Three more columns of padding on the left of every prompt, up to the update.

    (That the update is right for rows with padding is the golden update's business.)
    """
    wide = tiny.World(tiny.make_setup(tiny.CALM, reward=True, p=tiny.P + 3))
    out = []
    for world, extra in ((rm, 0), (wide, 3)):
        state, frozen = world.trees()
        prompts = world.programs.put(tiny.prompts(extra=extra))
        rolled = world.programs.generate(state, frozen, prompts)
        experience, metrics = world.programs.score(state, frozen, rolled)
        assert experience.valid.shape[1] == tiny.P + tiny.T + extra
        kept = ("logp_old", "logp_ref", "values_old", "advantages", "returns", "scores")
        numbers = {name: getattr(experience, name) for name in kept}
        out.append((metrics, numbers, rolled.logp, rolled.tokens[:, -tiny.T :]))
    tiny.close(out[1], out[0], 2e-5)
