"""What training changes: the optimizers and the first state of a run.

Only actor and critic have optimizer state. Everything derives from one abstract
tree: the real arrays, their shardings, and what a checkpoint must hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from jppo.config import OptimConfig, Setup
from jppo.models import transformer
from jppo.types import Frozen, Params, TrainState


class Optimizers(NamedTuple):
    """The two gradient transformations; static, never part of the state."""

    actor: optax.GradientTransformation
    critic: optax.GradientTransformation


def make_schedule(cfg: OptimConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by optimizer step: linear warm-up, then constant or decay to 0."""
    decay_steps = max(total_steps - cfg.warmup, 1)
    after = {
        "constant": optax.constant_schedule(cfg.lr),
        "linear": optax.linear_schedule(cfg.lr, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(cfg.lr, decay_steps),
    }[cfg.schedule]
    if not cfg.warmup:
        return after
    # Starts at lr/warmup, not at 0: a first step of size 0 would be a step wasted.
    warm = optax.linear_schedule(cfg.lr / cfg.warmup, cfg.lr, max(cfg.warmup - 1, 1))
    return optax.join_schedules([warm, after], [cfg.warmup])


def _decayed(params: Params) -> Any:
    """Weight decay acts on matrices, not on norm scales and biases."""

    def is_matrix(path, _):
        return path[-1].key not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(
    cfg: OptimConfig, total_steps: int
) -> optax.GradientTransformationExtraArgs:
    """AdamW behind a clip by global norm."""
    adam = optax.adamw(
        make_schedule(cfg, total_steps),
        b1=cfg.b1,
        b2=cfg.b2,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        mask=_decayed,
    )
    clip = optax.clip_by_global_norm(cfg.max_grad_norm)
    return optax.chain(clip, adam) if cfg.max_grad_norm > 0 else optax.chain(adam)


def make_optimizers(setup: Setup) -> Optimizers:
    """Both optimizers, with schedules over all optimizer steps of the run."""
    cfg = setup.config
    total = cfg.run.steps * cfg.ppo.epochs * cfg.ppo.minibatches
    return Optimizers(
        make_optimizer(cfg.actor_optim, total), make_optimizer(cfg.critic_optim, total)
    )


def init_state(
    setup: Setup, actor: Params, critic: Params, key: Key[Array, ""]
) -> TrainState:
    """Step 0: zero moments around the trainable trees that are given."""
    tx = make_optimizers(setup)
    return TrainState(
        actor=actor,
        critic=critic,
        opt_actor=tx.actor.init(actor),
        opt_critic=tx.critic.init(critic),
        beta=jnp.float32(setup.config.kl.beta),
        key=key,
        step=jnp.int32(0),
    )


def init_trees(
    setup: Setup,
    policy: Params,
    reward: Params | None,
    key: Key[Array, ""],
) -> tuple[Params, Params, Frozen]:
    """(actor, critic, frozen trees) from whole models.

    The reference is the policy itself; a critic without a reward model to start from
    is the policy's blocks under a fresh head. Trunks are cut off once, here, so that
    roles that share one also share its memory.
    """
    actor_base, actor = transformer.split_params(policy, setup.actor_frozen)
    head = transformer.init_head(key, setup.critic.d_model)
    shared = setup.config.critic.layout == "shared"
    if setup.config.critic.init == "reward" and reward is not None:
        critic_base, critic = transformer.split_params(reward, setup.critic_frozen)
    elif shared:
        critic_base, critic = {}, {"head": head}
    else:
        whole = {k: policy[k] for k in ("embed", "blocks", "norm")} | {"head": head}
        critic_base, critic = transformer.split_params(whole, setup.critic_frozen)
    on_critic = setup.reward_on_critic_base
    frozen = Frozen(
        actor_base=actor_base,
        critic_base=critic_base,
        reference=actor,
        reward=critic if on_critic else reward,
        reward_base=None if on_critic or reward is None else {},
    )
    return actor, critic, frozen


def abstract_policy(setup: Setup) -> Params:
    """Shapes of the whole policy."""
    key = jax.random.key(0)
    return jax.eval_shape(lambda: transformer.init_params(setup.actor, key))


def abstract_trees(setup: Setup) -> tuple[TrainState, Frozen]:
    """Shapes of everything on the device, without a byte allocated."""

    def build():
        key = jax.random.key(0)
        policy = transformer.init_params(setup.actor, key)
        reward = None
        if setup.reward is not None:
            reward = transformer.init_params(setup.reward, key, scalar_head=True)
        actor, critic, frozen = init_trees(setup, policy, reward, key)
        return init_state(setup, actor, critic, key), frozen

    return jax.eval_shape(build)
