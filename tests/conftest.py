"""Set-up of every test: eight fake CPU devices, and programs that are compiled once."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# The models are tiny: compiling them costs far more than running them.
jax.config.update("jax_disable_most_optimizations", True)

import tiny  # noqa: E402

from jppo import ppo, types  # noqa: E402

# Records also carry shardings, shapes and numpy arrays through `jax.tree.map`, so
# their constructors are exempt from the checks of annotations that the run turns on.
for record in vars(types).values():
    if hasattr(record, "__dataclass_fields__"):
        record.__init__ = getattr(record.__init__, "__wrapped__", record.__init__)


@pytest.fixture(scope="session")
def py():
    """Programs that take scores from Python; metrics keep every optimizer step.

    Besides the folded metrics, `update` returns the unfolded ones as `steps/NAME`.
    """
    folded = ppo.finish

    def finish(setup, state, scored, steps):
        state, metrics = folded(setup, state, scored, steps)
        return state, metrics | {f"steps/{k}": v for k, v in steps.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "finish", finish)
        world = tiny.World(tiny.make_setup())
        rolled = world.programs.generate(*world.trees(), tiny.prompts())
        experience, metrics = world.programs.score(
            *world.trees(), rolled, tiny.scores()
        )
        world.programs.update(*world.trees(), experience, metrics)
    return world


@pytest.fixture(scope="session")
def rm():
    """Programs whose scores come from a reward model's param tree."""
    return tiny.World(tiny.make_setup(reward=True))


@pytest.fixture(scope="session")
def rolled(py):
    """One batch of responses of the first policy."""
    return py.programs.generate(*py.trees(), tiny.prompts())


@pytest.fixture(scope="session")
def scored(py, rolled):
    """(experience, metrics) of `rolled` under `tiny.scores()`."""
    return py.programs.score(*py.trees(), rolled, tiny.scores())
