"""What exists on the device when one model is fitted: its jitted programs.

    step    (state, frozen, batch) → state, metrics     batch: leaves [parts, b, …]
    loss    (params, frozen, batch) → sums              one part, for evaluation
    scores  (params, frozen, batch) → [b]               reward models only

Fine-tuning, reward models and DPO are the same programs around another objective.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jppo.checks import ConfigError
from jppo.gradients import Metrics, guarded_update, summed
from jppo.sharding import BATCH, TRAIN_RULES, Rules, replicated, tree_shardings
from jppo.types import FitFrozen, FitState, Params

Objective = Callable[
    [Params, FitFrozen, Any], tuple[Float[Array, ""], Float[Array, ""], Metrics]
]


@dataclasses.dataclass(frozen=True)
class Fit:
    """The compiled programs of one fit on one mesh."""

    mesh: Mesh
    step: Callable[..., tuple[FitState, Metrics]]
    loss: Callable[..., Metrics]
    scores: Callable[..., Any] | None
    state_shardings: FitState
    frozen_shardings: FitFrozen

    def place(self, state: FitState, frozen: FitFrozen) -> tuple[FitState, FitFrozen]:
        """Moves the trees to their devices; the state, donated to steps, is a copy."""
        state, frozen = jax.device_put(
            (state, frozen), (self.state_shardings, self.frozen_shardings)
        )
        return jax.tree.map(jnp.copy, state), frozen

    def put(self, batch: Any, *, parts: bool) -> Any:
        """Moves host arrays to the mesh, rows over the batch axes."""
        return jax.device_put(batch, _rows(self.mesh, parts))


def _rows(mesh: Mesh, parts: bool) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*((None,) if parts else ()), BATCH))


def fit_step(
    objective: Objective,
    tx: optax.GradientTransformation,
    state: FitState,
    frozen: FitFrozen,
    batch: Any,
) -> tuple[FitState, Metrics]:
    """One optimizer step on the parts of a batch. Pure.

    The gradient is the sum over parts divided once by the count of all: it does not
    depend on how the batch is cut.
    """

    def one(part: Any) -> tuple[Params, Metrics]:
        def total_of(params):
            total, count, sums = objective(params, frozen, part)
            return total, sums | {"loss": total, "count": count}

        return jax.grad(total_of, has_aux=True)(state.params)

    grads, sums = summed(one, batch)
    count = jnp.maximum(sums.pop("count"), 1.0)
    grads = jax.tree.map(lambda g: g / count, grads)
    params, opt, norms = guarded_update(tx, state.params, state.opt, grads)
    metrics = {k: v / count for k, v in sums.items()} | norms | {"count": count}
    return FitState(params=params, opt=opt, step=state.step + 1), metrics


def build_fit(
    objective: Objective,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    state: FitState,
    frozen: FitFrozen,
    *,
    scores: Callable[..., Any] | None = None,
    rules: Rules = TRAIN_RULES,
) -> Fit:
    """Names, jits and shards the programs of one fit. Compiles nothing yet.

    state, frozen: the trees, or their shapes. scores: a score a row, if there is one.
    """
    state_s, frozen_s = (tree_shardings(tree, mesh, rules) for tree in (state, frozen))
    everywhere = replicated(mesh)

    def evaluate(params, frozen, batch):
        total, count, sums = objective(params, frozen, batch)
        return sums | {"loss": total, "count": count}

    def program(fn, first, out, parts, donate=()):
        jitted = jax.jit(
            fn,
            in_shardings=(first, frozen_s, _rows(mesh, parts)),
            out_shardings=out,
            donate_argnums=donate,
        )

        def call(*values):
            with jax.set_mesh(mesh):
                return jitted(*values)

        return call

    return Fit(
        mesh=mesh,
        step=program(
            lambda *values: fit_step(objective, tx, *values),
            state_s,
            (state_s, everywhere),
            parts=True,
            donate=(0,),
        ),
        loss=program(evaluate, state_s.params, everywhere, parts=False),
        scores=scores and program(scores, state_s.params, everywhere, parts=False),
        state_shardings=state_s,
        frozen_shardings=frozen_s,
    )


def check_rows(mesh: Mesh, rows: int, what: str) -> None:
    """Raises ConfigError when rows cannot be cut evenly over the mesh."""
    cut = math.prod(mesh.shape[axis] for axis in BATCH)
    if rows % cut:
        raise ConfigError(
            f"{what} of {rows} rows does not divide over the {cut} devices of mesh"
            f" axes {', '.join(BATCH)}"
        )
