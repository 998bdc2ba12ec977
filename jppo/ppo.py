"""The PPO update: epochs × minibatches of the clipped objective, as one scan.

    loss = L_clip + c₁ L_V − c₂ S  (+ β KL[π, π_ref] where the KL is in the loss)

Losses are sums; each is divided once by the count of its whole minibatch, so the
gradient does not depend on how the minibatch is cut into micro-batches or over
devices. Sources: arXiv 1707.06347; arXiv 2403.17031.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Key

from jppo.config import Setup
from jppo.gradients import keep_if, summed
from jppo.kl import KLState, adaptive_kl, fixed_kl, paper_kl
from jppo.losses import clip_loss, entropy_bonus, kl_loss, value_loss
from jppo.masked import aggregate
from jppo.models.lora import overlay
from jppo.rollout import Metrics, critic_values, into_groups, policy_outputs, score
from jppo.state import Optimizers
from jppo.types import Experience, Frozen, Params, Rollout, TrainState

Trainable = tuple[Params, Params]
Steps = dict[str, Float[Array, " steps"]]  # metrics, one entry an optimizer step


def ppo_loss(
    trainable: Trainable,
    setup: Setup,
    frozen: Frozen,
    part: Experience,
    count: Float[Array, ""],
    beta: Float[Array, ""],
) -> tuple[Float[Array, ""], Metrics]:
    """This part's share of the minibatch loss, and its sums of metrics.

    count: the normaliser of the whole minibatch under `ppo.aggregation`.
    """
    cfg = setup.config.ppo
    actor = overlay(frozen.reference, trainable[0])
    critic = overlay(frozen.critic_under, trainable[1])
    how = {"aggregation": cfg.aggregation, "length": part.mask.shape[1]}
    logp, entropy, hidden = policy_outputs(
        setup,
        actor,
        frozen.actor_base,
        part.actor_in,
        part.valid,
        part.tokens,
        entropy=cfg.entropy_coef != 0,
    )
    values = critic_values(setup, critic, part.critic_in, part.valid, hidden)
    policy, _, metrics = clip_loss(
        logp,
        part.logp_old,
        part.advantages,
        part.mask,
        eps=cfg.eps,
        eps_high=cfg.eps_high,
        dual_clip=cfg.dual_clip,
        weights=part.weights if cfg.tis_cap is not None else None,
        **how,
    )
    value, _, value_metrics = value_loss(
        values, part.values_old, part.returns, part.mask, eps=cfg.value_eps, **how
    )
    loss = policy + cfg.value_coef * value
    metrics = metrics | value_metrics | {"policy_loss": policy, "value_loss": value}
    if entropy is not None:
        bonus, *_ = entropy_bonus(entropy, part.mask, **how)
        loss = loss - cfg.entropy_coef * bonus
    if setup.config.kl.where == "loss":
        kl, *_ = kl_loss(
            logp,
            part.logp_ref,
            part.mask,
            estimator=setup.config.kl.estimator,
            **how,
        )
        loss = loss + beta * kl
        metrics = metrics | {"kl_loss": kl}
    return loss / count, metrics


def minibatch_gradients(
    setup: Setup,
    trainable: Trainable,
    frozen: Frozen,
    batch: Experience,
    beta: Float[Array, ""],
) -> tuple[Trainable, Metrics]:
    """Gradient and metrics of one minibatch, accumulated over its micro-batches."""
    cfg = setup.config.ppo
    _, count = aggregate(
        jnp.zeros_like(batch.logp_old),
        batch.mask,
        mode=cfg.aggregation,
        length=batch.mask.shape[1],
    )
    count = jnp.maximum(count, 1.0)
    gradient = jax.value_and_grad(ppo_loss, has_aux=True)

    def one(part: Experience):
        (_, metrics), grads = gradient(trainable, setup, frozen, part, count, beta)
        return grads, metrics

    parts = into_groups(batch, cfg.micro_batches)
    grads, sums = summed(one, parts)
    tokens = jnp.maximum(batch.mask.sum(dtype=jnp.float32), 1.0)
    whole = {"policy_loss", "value_loss", "kl_loss"}
    metrics = {
        k: v if k.endswith("_max") else v / (count if k in whole else tokens)
        for k, v in sums.items()
        if k != "tokens"
    }
    return grads, metrics


def apply_gradients(
    tx: Optimizers,
    trees: tuple[Params, Params, Any, Any],
    grads: Trainable,
    warming: Bool[Array, ""] | bool = False,
) -> tuple[tuple[Params, Params, Any, Any], Metrics]:
    """One optimizer step of actor and critic together.

    A non-finite gradient in either skips both, moments included, and is counted.
    warming: the actor and its moments stay as they are.
    """
    actor, critic, opt_actor, opt_critic = trees
    norms = optax.tree.norm(grads[0]), optax.tree.norm(grads[1])
    ok = jnp.isfinite(norms[0]) & jnp.isfinite(norms[1])
    up_a, new_opt_a = tx.actor.update(grads[0], opt_actor, actor)
    up_c, new_opt_c = tx.critic.update(grads[1], opt_critic, critic)
    moves = ok & ~jnp.asarray(warming)
    stepped = (optax.apply_updates(actor, up_a), new_opt_a)
    actor, opt_actor = keep_if(moves, stepped, (actor, opt_actor))
    stepped = (optax.apply_updates(critic, up_c), new_opt_c)
    critic, opt_critic = keep_if(ok, stepped, (critic, opt_critic))
    return (actor, critic, opt_actor, opt_critic), {
        "grad_norm_actor": norms[0],
        "grad_norm_critic": norms[1],
        "skipped": 1.0 - ok.astype(jnp.float32),
    }


def minibatch_rows(setup: Setup, key: Key[Array, ""], rows: int) -> Array:
    """Row indices `[epochs · minibatches, rows / minibatches]`, shuffled an epoch.

    A single minibatch is the batch in its own order: a shuffle would move data over
    the mesh and change nothing.
    """
    cfg = setup.config.ppo
    if cfg.minibatches == 1:
        return jnp.tile(jnp.arange(rows), (cfg.epochs, 1))
    keys = jax.random.split(key, cfg.epochs)
    order = jax.vmap(lambda k: jax.random.permutation(k, rows))(keys)
    return order.reshape(cfg.epochs * cfg.minibatches, -1)


def next_beta(
    setup: Setup, beta: Float[Array, ""], kl: Float[Array, ""], n: Float[Array, ""]
) -> Float[Array, ""]:
    """β for the next rollout, from this one's mean sequence KL over n sequences."""
    cfg, old = setup.config.kl, KLState(beta=beta)
    if cfg.controller == "ziegler":
        new = adaptive_kl(old, kl, n, target=cfg.target, horizon=cfg.horizon)
    elif cfg.controller == "paper":
        new = paper_kl(old, kl, target=cfg.target)
    else:
        new = fixed_kl(old, kl)
    return new.beta


def update(
    setup: Setup,
    tx: Optimizers,
    state: TrainState,
    frozen: Frozen,
    experience: Experience,
) -> tuple[TrainState, Steps]:
    """Epochs × minibatches on one rollout. Metrics are stacked: one entry a step."""
    key, _, shuffle = jax.random.split(state.key, 3)  # the second drew the rollout
    single = setup.config.ppo.minibatches == 1
    warming = state.step < setup.config.critic.warmup

    def step(trees, rows):
        batch = experience
        if not single:
            batch = jax.tree.map(lambda a: jnp.take(a, rows, axis=0), experience)
        grads, metrics = minibatch_gradients(
            setup, trees[:2], frozen, batch, state.beta
        )
        trees, norms = apply_gradients(tx, trees, grads, warming)
        return trees, metrics | norms

    trees = (state.actor, state.critic, state.opt_actor, state.opt_critic)
    order = minibatch_rows(setup, shuffle, experience.mask.shape[0])
    (actor, critic, opt_actor, opt_critic), metrics = jax.lax.scan(step, trees, order)
    new = dataclasses.replace(
        state,
        actor=actor,
        critic=critic,
        opt_actor=opt_actor,
        opt_critic=opt_critic,
        key=key,
        step=state.step + 1,
    )
    return new, metrics


def train_step(
    setup: Setup,
    tx: Optimizers,
    state: TrainState,
    frozen: Frozen,
    rollout: Rollout,
    scores: Float[Array, " b"] | None = None,
) -> tuple[TrainState, Metrics]:
    """One PPO iteration after generation: score, update, move β."""
    experience, metrics = score(setup, state, frozen, rollout, scores)
    new, steps = update(setup, tx, state, frozen, experience)
    return finish(setup, new, metrics, steps)


def finish(
    setup: Setup, state: TrainState, scored: Metrics, steps: Steps
) -> tuple[TrainState, Metrics]:
    """Moves β and folds the metrics of all optimizer steps into one of each.

    While the critic warms up β stays: the policy has not moved.
    """
    beta = next_beta(setup, state.beta, scored["kl"], scored["sequences"])
    beta = jnp.where(state.step <= setup.config.critic.warmup, state.beta, beta)
    folded = {
        k: v.max() if k.endswith("_max") else v.sum() if k == "skipped" else v.mean()
        for k, v in steps.items()
    }
    return dataclasses.replace(state, beta=beta), scored | folded
