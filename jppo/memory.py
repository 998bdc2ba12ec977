"""What the param trees of a run cost, by arithmetic: no device, no byte allocated.

The shapes are those of the trees that the programs run (`state.fresh_trees`), so there
is no second count of parameters to keep true. Arrays that several roles hold are
counted once, as they are placed once. Activations, the KV cache and what a program
keeps for a moment are not here: compilers know them, arithmetic does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jppo.config import ModelConfig, Setup
from jppo.models import transformer
from jppo.state import fresh_trees
from jppo.types import Frozen, TrainState

GB = 10**9
ROLES = ("actor", "critic", "reference", "reward")

# Mixed-precision Adam as it is usually told: bf16 weights and gradients, and in f32
# the master weights and both moments (arXiv 1910.02054, section 3.1).
TEXTBOOK_TRAINED = 2 + 2 + 4 + 4 + 4
TEXTBOOK_FROZEN = 2


class Holding(NamedTuple):
    """One kind of arrays, and the roles that need them."""

    roles: tuple[str, ...]
    kind: str  # "weights", "gradients", "moments"
    weights: int  # parameters that it is for
    bytes: int


def textbook_bytes(weights: int, *, trained: bool) -> int:
    """Bytes of a model under mixed-precision Adam, or frozen in bf16."""
    return weights * (TEXTBOOK_TRAINED if trained else TEXTBOOK_FROZEN)


def weights_of(cfg: ModelConfig) -> int:
    """Parameters of a whole policy of this shape."""
    key = jax.random.key(0)
    tree = jax.eval_shape(lambda: transformer.init_params(cfg, key))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def nbytes(leaf: Any) -> int:
    """Bytes of an array or of its shape."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _sum(roles: Iterable[str], kind: str, leaves: Any, weights: Any = None) -> Holding:
    leaves = jax.tree.leaves(leaves)
    counted = leaves if weights is None else jax.tree.leaves(weights)
    size = sum(math.prod(leaf.shape) for leaf in counted)
    return Holding(tuple(roles), kind, size, sum(map(nbytes, leaves)))


def _users(setup: Setup) -> dict[str, set[str]]:
    """Which roles stand on each of the frozen trees."""
    cfg = setup.config
    adapted = {"actor"} if cfg.policy.lora.rank else set()
    shared = {"critic"} if cfg.critic.layout == "shared" else set()
    on_critic = {"reward"} if setup.reward_on_critic_base else set()
    return {
        "actor_base": {"actor", "reference"} | shared,
        "critic_base": {"critic"} | on_critic,
        "reference": {"reference"} | adapted | (shared if adapted else set()),
        "critic_under": {"critic"},
        "reward": {"reward"},
    }


def _abstract(setup: Setup, one_base: bool) -> tuple[TrainState, Frozen, Frozen]:
    """Shapes of state and frozen trees, and the identity of each frozen array."""
    names: list[Frozen] = []

    def build():
        state, frozen = fresh_trees(setup, jax.random.key(0), one_base=one_base)
        names.append(jax.tree.map(id, frozen))
        return state, frozen

    return *jax.eval_shape(build), names[0]


def holdings(setup: Setup, *, one_base: bool = False) -> tuple[Holding, ...]:
    """All that four roles keep on the devices together, an entry for each owner.

    Gradients exist during the update only, but all of them at once.
    one_base: the reward model is an adapter over the policy's own arrays.
    """
    state, frozen, names = _abstract(setup, one_base)
    found: list[Holding] = []
    for role in ("actor", "critic"):
        params, moments = getattr(state, role), getattr(state, f"opt_{role}")
        found += [
            _sum([role], "weights", params),
            _sum([role], "gradients", params),
            _sum([role], "moments", moments, params),
        ]
    users: dict[int, set[str]] = {}
    arrays: dict[int, Any] = {}
    for field, roles in _users(setup).items():
        leaves = jax.tree.leaves(getattr(frozen, field))
        ids = jax.tree.leaves(getattr(names, field))
        for leaf, name in zip(leaves, ids, strict=True):
            users.setdefault(name, set()).update(roles)
            arrays[name] = leaf
    owners: dict[tuple[str, ...], list[Any]] = {}
    for name, roles in users.items():
        owner = tuple(role for role in ROLES if role in roles)
        owners.setdefault(owner, []).append(arrays[name])
    return (*found, *(_sum(owner, "weights", own) for owner, own in owners.items()))


def total(found: Iterable[Holding], *roles: str) -> int:
    """Bytes that exactly these roles own together; of all holdings without roles."""
    return sum(h.bytes for h in found if not roles or h.roles == roles)
