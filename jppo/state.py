"""What training changes: the optimizers and the first state of a run.

Only actor and critic have optimizer state. Everything derives from one abstract
tree: the real arrays, their shardings, and what a checkpoint must hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from jppo.config import (
    Config,
    ConfigError,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    Setup,
)
from jppo.models import transformer
from jppo.models.lora import init_adapter, overlay, split_adapter
from jppo.types import FitState, Frozen, Params, TrainState


class Optimizers(NamedTuple):
    """The two gradient transformations; static, never part of the state."""

    actor: optax.GradientTransformation
    critic: optax.GradientTransformation


def frozen_layers(cfg: ModelConfig, train_layers: int | None, key: str) -> int | None:
    """Blocks below those that learn; None where every weight learns."""
    if train_layers is None:
        return None
    if not 0 <= train_layers <= cfg.n_layers:
        raise ConfigError(
            f"{key} is {train_layers}, the model has {cfg.n_layers} blocks"
        )
    return cfg.n_layers - train_layers


def make_roles(
    cfg: Config, policy: ModelConfig, reward: ModelConfig | None
) -> dict[str, Any]:
    """The fields of a `Setup` that say what each role is and which blocks learn."""
    actor = dataclasses.replace(
        policy,
        dtype=cfg.policy.dtype,
        remat=cfg.policy.remat,
        unroll=cfg.policy.unroll,
        lora_scale=cfg.policy.lora.scale,
    )
    from_reward = cfg.critic.init == "reward"
    if from_reward and reward is None:
        raise ConfigError("critic.init=reward needs a reward model (reward.model)")
    like = {"dtype": actor.dtype, "remat": actor.remat, "unroll": actor.unroll}
    reward = reward and dataclasses.replace(reward, **like)
    critic = reward if from_reward else actor
    assert critic is not None
    if not from_reward or cfg.critic.lora.rank:
        critic = dataclasses.replace(critic, lora_scale=cfg.critic.lora.scale)
    layers, shared = cfg.critic.train_layers, cfg.critic.layout == "shared"
    cut = None if shared else frozen_layers(critic, layers, "critic.train_layers")
    top = frozen_layers(actor, cfg.policy.train_layers, "policy.train_layers")
    return {
        "config": cfg,
        "actor": actor,
        "critic": critic,
        "reward": reward,
        "actor_frozen": top,
        "critic_frozen": cut,
        "reward_on_critic_base": from_reward,
    }


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
    """Both optimizers, with schedules over all steps that each takes in the run."""
    cfg = setup.config
    each = cfg.ppo.epochs * cfg.ppo.minibatches
    return Optimizers(
        make_optimizer(cfg.actor_optim, (cfg.run.steps - cfg.critic.warmup) * each),
        make_optimizer(cfg.critic_optim, cfg.run.steps * each),
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


def init_fit(tx: optax.GradientTransformation, params: Params) -> FitState:
    """Step 0 of a fit: zero moments around what learns."""
    params = jax.tree.map(jnp.asarray, params)
    return FitState(params=params, opt=tx.init(params), step=jnp.int32(0))


def init_trees(
    setup: Setup,
    policy: Params,
    reward: Params | None,
    key: Key[Array, ""],
) -> tuple[Params, Params, Frozen]:
    """(actor, critic, frozen trees) from whole models.

    The reference is the policy itself. The critic is the reward model, the policy's
    blocks under a fresh head, or fresh altogether. With an adapter only its factors
    (and a head) learn, over weights that stay as they are. Trunks are cut off once,
    here, so that roles that share one also share its memory.
    """
    cfg = setup.config
    head_key, actor_key, critic_key = jax.random.split(key, 3)
    head = transformer.init_head(head_key, setup.critic.d_model)
    actor_base, reference = transformer.split_params(policy, setup.actor_frozen)
    actor = trainable(reference, cfg.policy.lora, actor_key)
    critic_base: Params = {}
    if cfg.critic.layout == "shared":
        rest = {"head": head}
    elif cfg.critic.init == "reward" and reward is not None:
        critic_base, rest = transformer.split_params(reward, setup.critic_frozen)
    elif cfg.critic.init == "scratch":
        rest = transformer.init_params(setup.critic, head_key, scalar_head=True)
    elif setup.critic_frozen == setup.actor_frozen:
        critic_base, rest = actor_base, reference | {"head": head}
        rest.pop("lm_head", None)
    else:
        whole = {k: policy[k] for k in ("embed", "blocks", "norm")} | {"head": head}
        critic_base, rest = transformer.split_params(whole, setup.critic_frozen)
    critic = trainable(rest, cfg.critic.lora, critic_key)
    adapted = critic is not rest
    on_critic = setup.reward_on_critic_base
    frozen = Frozen(
        actor_base=actor_base,
        critic_base=critic_base,
        reference=reference,
        critic_under={k: v for k, v in rest.items() if k != "head"} if adapted else {},
        reward=rest if on_critic else reward,
        reward_base=None if on_critic or reward is None else {},
    )
    return actor, critic, transformer.as_frozen(frozen, setup.actor.dtype)


def trainable(params: Params, lora: LoraConfig, key: Array) -> Params:
    """What of a tree learns: all of it, or an adapter and the head."""
    if not lora.rank:
        return params
    base, adapter = split_adapter(params)
    if not adapter:
        adapter = init_adapter(base, key, rank=lora.rank, targets=lora.targets)
    return adapter | ({"head": params["head"]} if "head" in params else {})


def whole_policy(state: TrainState, frozen: Frozen) -> Params:
    """The actor as one tree, with an adapter's factors in it."""
    return transformer.policy_params(frozen.actor_base, frozen.reference, state.actor)


def whole_critic(setup: Setup, state: TrainState, frozen: Frozen) -> Params:
    """The critic as one tree with its head, whatever it shares while it learns."""
    if setup.config.critic.layout == "shared":
        policy = whole_policy(state, frozen)
        return {k: v for k, v in policy.items() if k != "lm_head"} | state.critic
    critic = overlay(frozen.critic_under, state.critic)
    return transformer.merge_params(frozen.critic_base, critic)


def abstract_policy(setup: Setup) -> Params:
    """Shapes of the whole policy."""
    key = jax.random.key(0)
    return jax.eval_shape(lambda: transformer.init_params(setup.actor, key))


def fresh_trees(
    setup: Setup, key: Key[Array, ""], *, one_base: bool = False
) -> tuple[TrainState, Frozen]:
    """Everything on the device, with fresh weights.

    one_base: the reward model's blocks are the policy's own arrays, as where it is
    loaded as an adapter over the policy's base.
    """
    policy = transformer.init_params(setup.actor, key)
    reward = None
    if setup.reward is not None:
        reward = transformer.init_params(setup.reward, key, scalar_head=True)
        if one_base:
            reward |= {k: policy[k] for k in ("embed", "blocks", "norm")}
        if setup.reward_lora.rank:
            lora = setup.reward_lora
            factors = init_adapter(reward, key, rank=lora.rank, targets=lora.targets)
            reward = overlay(reward, factors)
    actor, critic, frozen = init_trees(setup, policy, reward, key)
    return init_state(setup, actor, critic, key), frozen


def abstract_trees(setup: Setup) -> tuple[TrainState, Frozen]:
    """Shapes of everything on the device, without a byte allocated."""
    return jax.eval_shape(lambda: fresh_trees(setup, jax.random.key(0)))
