"""Set-up of every test: eight fake CPU devices, and programs that are compiled once."""

import contextlib

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# The models are tiny: compiling them costs far more than running them.
QUICK = "jax_disable_most_optimizations"
jax.config.update(QUICK, True)

import tiny  # noqa: E402

from jppo import ppo, types  # noqa: E402

# Records also carry shardings, shapes and numpy arrays through `jax.tree.map`, so
# their constructors are exempt from the checks of annotations that the run turns on.
for record in vars(types).values():
    if hasattr(record, "__dataclass_fields__"):
        record.__init__ = getattr(record.__init__, "__wrapped__", record.__init__)


@pytest.fixture(scope="session")
def optimized():
    """A context in which programs compile as they do for users.

    Log-ratios are exactly 0 only if the compiler treats equal formulas alike.
    """

    @contextlib.contextmanager
    def context():
        jax.config.update(QUICK, False)
        yield
        jax.config.update(QUICK, True)

    return context


@pytest.fixture(scope="session")
def make_world(optimized):
    """World of a setup, compiled as for users; its metrics keep every optimizer step.

    Besides the folded metrics, `update` returns the unfolded ones as `steps/NAME`.
    """
    folded = ppo.finish

    def finish(setup, state, scored, steps):
        state, metrics = folded(setup, state, scored, steps)
        return state, metrics | {f"steps/{k}": v for k, v in steps.items()}

    def make(setup):
        world = tiny.World(setup)
        programs, trees = world.programs, world.trees()
        world.rolled = programs.generate(*trees, world.prompts())
        with pytest.MonkeyPatch.context() as patch, optimized():
            patch.setattr(ppo, "finish", finish)
            world.scored = programs.score(*trees, world.rolled, world.scores())
            programs.update(*trees, *world.scored)
        return world

    return make


@pytest.fixture(scope="session")
def py(make_world):
    """Programs that take scores from Python, on one device."""
    return make_world(tiny.make_setup())


@pytest.fixture(scope="session")
def rm():
    """Programs whose scores come from a reward model's param tree, on one device."""
    return tiny.World(tiny.make_setup(tiny.CALM, reward=True))


@pytest.fixture(scope="session")
def rolled(py):
    """One batch of responses of the first policy."""
    return py.rolled


@pytest.fixture(scope="session")
def scored(py):
    """(experience, metrics) of `rolled` under `tiny.scores()`."""
    return py.scored
