"""What exists on the device: each jitted program, its arguments and its shardings.

    generate  (state, frozen, prompts)            → rollout
    score     (state, frozen, rollout[, scores])  → experience, metrics
    update    (state, frozen, experience, metrics) → state, metrics
    iteration (state, frozen, prompts)            → state, metrics, rollout

`iteration` is the first three in one program, for rewards that are a param tree. The
loop runs these programs; a planner lowers and compiles the same ones for devices
that need not be attached (`abstract` gives their arguments).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo import decode, ppo, rollout
from jppo.config import ConfigError, Setup
from jppo.models import transformer
from jppo.sharding import (
    BATCH,
    TRAIN_RULES,
    Rules,
    batch_sharding,
    make_mesh,
    replicated,
    tree_shardings,
)
from jppo.state import abstract_trees, make_optimizers
from jppo.types import Experience, Frozen, Prompts, Rollout, TrainState


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled stages of one run on one mesh. Call them like functions."""

    setup: Setup
    mesh: Mesh
    generate: Callable[[TrainState, Frozen, Prompts], Rollout]
    score: Callable[..., tuple[Experience, dict[str, Any]]]
    update: Callable[..., tuple[TrainState, dict[str, Any]]]
    iteration: Callable[..., tuple[TrainState, dict[str, Any], Rollout]]
    state_shardings: TrainState
    frozen_shardings: Frozen

    def place(self, state: TrainState, frozen: Frozen) -> tuple[TrainState, Frozen]:
        """Moves the trees to their devices; actor and critic become copies.

        The state is donated to every update, so it must not share memory with the
        reference or the reward model that it started from. Arrays that roles share
        are moved once.
        """
        moved: dict[int, jax.Array] = {}

        def put(leaf: Any, sharding: Any) -> jax.Array:
            if id(leaf) not in moved:
                moved[id(leaf)] = jax.device_put(leaf, sharding)
            return moved[id(leaf)]

        state, frozen = jax.tree.map(
            put, (state, frozen), (self.state_shardings, self.frozen_shardings)
        )
        return jax.tree.map(jnp.copy, state), frozen

    def put(self, batch: Any) -> Any:
        """Moves host arrays to the mesh, first dimension over the batch axes."""
        return jax.device_put(batch, batch_sharding(self.mesh))


def generate(
    setup: Setup, state: TrainState, frozen: Frozen, prompts: Prompts
) -> Rollout:
    """One response a prompt from the current actor. Pure."""
    return decode.generate(
        setup.actor,
        transformer.policy_params(frozen.actor_base, frozen.reference, state.actor),
        prompts,
        jax.random.split(state.key, 3)[1],  # the other two are the update's
        settings=setup.config.sampling,
        stop_ids=setup.stop_ids,
        pad_id=setup.pad_id,
    )


def check_batch(setup: Setup, mesh: Mesh) -> None:
    """Raises ConfigError when rows cannot be cut evenly over the mesh."""
    cfg = setup.config.ppo
    cut = math.prod(mesh.shape[axis] for axis in BATCH)
    rows = cfg.batch_size // (cfg.minibatches * cfg.micro_batches)
    if rows % cut:
        raise ConfigError(
            f"a micro-batch of {rows} rows (ppo.batch_size {cfg.batch_size} /"
            f" minibatches {cfg.minibatches} / micro_batches {cfg.micro_batches}) does"
            f" not divide over the {cut} devices of mesh axes {', '.join(BATCH)}"
        )


def build(
    setup: Setup, mesh: Mesh | None = None, *, rules: Rules = TRAIN_RULES
) -> Programs:
    """Names, jits and shards the programs of one run. Compiles nothing yet."""
    mesh = mesh or make_mesh(dataclasses.asdict(setup.config.mesh))
    check_batch(setup, mesh)
    tx = make_optimizers(setup)
    state_s, frozen_s = (tree_shardings(t, mesh, rules) for t in abstract_trees(setup))
    batch, everywhere = batch_sharding(mesh), replicated(mesh)

    def run_score(state, frozen, rolled, scores=None):
        return rollout.score(setup, state, frozen, rolled, scores)

    def run_update(state, frozen, experience, scored):
        state, steps = ppo.update(setup, tx, state, frozen, experience)
        return ppo.finish(setup, state, scored, steps)

    def run_iteration(state, frozen, prompts):
        rolled = generate(setup, state, frozen, prompts)
        state, metrics = ppo.train_step(setup, tx, state, frozen, rolled)
        return state, metrics, rolled

    def program(fn, out, donate=(), args=(batch,)):
        jitted = jax.jit(
            fn,
            in_shardings=(state_s, frozen_s, *args),
            out_shardings=out,
            donate_argnums=donate,
        )

        def call(*values):
            with jax.set_mesh(mesh):
                return jitted(*values)

        def lower(*values):
            with jax.set_mesh(mesh):
                return jitted.lower(*values)

        call.lower = lower  # type: ignore[attr-defined]
        call.cache_size = jitted._cache_size  # type: ignore[attr-defined]
        return call

    scores = () if setup.reward is not None else (batch,)
    return Programs(
        setup=setup,
        mesh=mesh,
        generate=program(
            lambda state, frozen, prompts: generate(setup, state, frozen, prompts),
            batch,
        ),
        score=program(run_score, (batch, everywhere), args=(batch, *scores)),
        update=program(
            run_update, (state_s, everywhere), donate=(0,), args=(batch, everywhere)
        ),
        iteration=program(run_iteration, (state_s, everywhere, batch), donate=(0,)),
        state_shardings=state_s,
        frozen_shardings=frozen_s,
    )


def abstract_prompts(setup: Setup) -> Prompts:
    """Shapes of one batch of prompts."""
    b, p = setup.config.ppo.batch_size, setup.prompt_tokens
    shapes: tuple[Any, ...] = (
        jax.ShapeDtypeStruct((b, p), jnp.int32),
        jax.ShapeDtypeStruct((b, p), jnp.bool_),
        jax.ShapeDtypeStruct((b,), jnp.float32),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    )
    return Prompts(*shapes)
