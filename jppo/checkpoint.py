"""Checkpoints: all that training changed, in one directory, written by Orbax.

A checkpoint holds the whole TrainState (actor, critic, both optimizers, β, the random
key and the step) together with the data cursor and the identity of the models that it
belongs to. The frozen trees are not in it: they come from where they came from, and a
fingerprint says whether those are still the same.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jppo.config import ModelConfig, Setup
from jppo.types import Frozen, TrainState


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used here: one line that says why."""


def _plain(state: TrainState) -> dict[str, Any]:
    """The state as a dict of plain arrays: a typed key becomes its data."""
    tree = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return tree | {"key": jax.random.key_data(state.key)}


def identity(setup: Setup, frozen: Frozen) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that restores it."""

    def shape_of(cfg: ModelConfig) -> dict[str, Any]:
        skip = ("dtype", "remat", "unroll", "max_positions")
        tree = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in skip}
        return json.loads(json.dumps(tree))  # as it will be read back

    def print_of(*trees: Any) -> str:
        crc = 0
        for leaf in jax.tree.leaves(trees):
            crc = zlib.crc32(np.asarray(leaf[(0,) * (leaf.ndim - 1)]).tobytes(), crc)
        return f"{crc:08x}"

    return {
        "actor": shape_of(setup.actor),
        "critic": shape_of(setup.critic),
        "critic_layout": setup.config.critic.layout,
        "actor_frozen": setup.actor_frozen,
        "critic_frozen": setup.critic_frozen,
        "actor_lora": setup.config.policy.lora.rank,
        "critic_lora": setup.config.critic.lora.rank,
        "reference_weights": print_of(frozen.actor_base, frozen.reference),
        "reward_weights": print_of(frozen.critic_base, frozen.reward),
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for k, v in tree.items():
        flat |= _flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k: v}
    return flat


class Checkpoints:
    """The checkpoints of one run: `folder/STEP/`, the last `keep` of them."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        logging.getLogger("absl").setLevel(logging.WARNING)
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=max(keep, 1), create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Writes checkpoint `state.step`; training may go on while it is written."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_plain(state)),
                meta=ocp.args.JsonSave(meta),
            ),
        )

    def restore(
        self, like: TrainState, expect: dict[str, Any], step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """(state, meta) of a checkpoint, laid out like `like`.

        expect: `identity` of the run that asks. Raises CheckpointError naming the
        first thing that differs.
        """
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            have = sorted(self._manager.all_steps())
            raise CheckpointError(f"{self.folder}: no checkpoint {step}, have {have}")
        meta = self._manager.restore(
            step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
        )["meta"]
        saved, wanted = _flat(meta["identity"]), _flat(expect)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{self.folder / str(step)} belongs to another model: {name} is"
                    f" {saved.get(name)} there, {wanted.get(name)} here; use another"
                    " run.folder, or run.resume=false with an empty one"
                )
        target = _plain(like)
        tree = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
        )["state"]
        tree["key"] = jax.random.wrap_key_data(tree["key"])
        return TrainState(**tree), meta

    def close(self) -> None:
        """Waits for writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()
