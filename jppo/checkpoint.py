"""Checkpoints: all that training changed, in one directory, written by Orbax.

A checkpoint of PPO holds the whole TrainState (actor, critic, both optimizers, β, the
random key and the step), one of a fit its FitState; beside it the data cursor and the
identity of the models that it belongs to. The frozen trees are not in it: they come
from where they came from, and a fingerprint says whether those are still the same.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jppo.config import ModelConfig, Setup
from jppo.models.lora import split_adapter
from jppo.sharding import path_name
from jppo.types import FitFrozen, FitState, Frozen, TrainState

State = TypeVar("State", TrainState, FitState)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used here: one line that says why."""


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _plain(state: Any) -> dict[str, Any]:
    """The state as a dict of plain arrays: a typed key becomes its data."""
    tree = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {k: jax.random.key_data(v) if _is_key(v) else v for k, v in tree.items()}


def _shape_of(cfg: ModelConfig) -> dict[str, Any]:
    """What of a model's shape and traits must stay as it is."""
    skip = ("dtype", "remat", "unroll", "max_positions")
    tree = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in skip}
    return json.loads(json.dumps(tree))  # as it will be read back


def _print_of(*trees: Any) -> str:
    """A fingerprint of weights: a checksum of the first row of each."""
    crc = 0
    for leaf in jax.tree.leaves(trees):
        crc = zlib.crc32(np.asarray(leaf[(0,) * (leaf.ndim - 1)]).tobytes(), crc)
    return f"{crc:08x}"


def identity(setup: Setup, frozen: Frozen) -> dict[str, Any]:
    """What must agree between a checkpoint of PPO and the run that restores it."""
    return {
        "actor": _shape_of(setup.actor),
        "critic": _shape_of(setup.critic),
        "critic_layout": setup.config.critic.layout,
        "actor_frozen": setup.actor_frozen,
        "critic_frozen": setup.critic_frozen,
        "actor_lora": setup.config.policy.lora.rank,
        "critic_lora": setup.config.critic.lora.rank,
        "reference_weights": _print_of(frozen.actor_base, frozen.reference),
        "reward_weights": _print_of(frozen.critic_base, frozen.reward),
    }


def fit_identity(
    kind: str, cfg: ModelConfig, start: FitState, frozen: FitFrozen
) -> dict[str, Any]:
    """What must agree between a checkpoint of a fit and the run that restores it.

    start: the state before the first step. Fresh heads and adapters, which follow from
    the seed, do not count.
    """
    weights, adapter = split_adapter(start.params)
    weights.pop("head", None)
    factors = jax.tree.leaves(adapter)
    return {
        "kind": kind,
        "model": _shape_of(cfg),
        "lora": int(factors[0].shape[-1]) if factors else 0,
        "weights": _print_of(frozen.base, frozen.under, weights),
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for k, v in tree.items():
        flat |= _flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k: v}
    return flat


def describe(
    path: str | Path,
) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], str]]]:
    """(meta, arrays as (path, shape, dtype)) of one checkpoint, without its weights.

    Raises CheckpointError where `path` is no complete checkpoint of jppo's.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    path = Path(path).absolute()
    try:
        meta = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
        with ocp.StandardCheckpointer() as reader:
            tree = reader.metadata(path / "state").item_metadata.tree
    except (OSError, ValueError, AttributeError) as error:
        says = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not a checkpoint of jppo's ({says})") from None
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return meta, [
        (path_name(at), tuple(leaf.shape), str(np.dtype(leaf.dtype)))
        for at, leaf in leaves
    ]


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

    def save(self, state: TrainState | FitState, meta: dict[str, Any]) -> None:
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
        self, like: State, expect: dict[str, Any], step: int | None = None
    ) -> tuple[State, dict[str, Any]]:
        """(state, meta) of a checkpoint, laid out like `like`.

        expect: identity of the run that asks. Raises CheckpointError naming the
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
        for name, leaf in tree.items():
            if _is_key(getattr(like, name)):
                tree[name] = jax.random.wrap_key_data(leaf)
        return type(like)(**tree), meta

    def close(self) -> None:
        """Waits for writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()
