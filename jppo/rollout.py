"""From a rollout to experience: log-probs, values, scores, shaped rewards, advantages.

Alignment, once for all: with s = p + t positions, the hidden state at position i
predicts token i + 1, so responses are scored from positions p − 1 … p + t − 2.
Everything here is one forward pass a role, and a role's frozen trunk is run once for
all the roles that stand on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jppo.advantages import gae_scan
from jppo.config import ModelConfig, Setup
from jppo.kl import kl_estimate, kl_penalty, missing_eos, score_mask
from jppo.logprobs import chunked_logprobs
from jppo.losses import explained_variance, tis_weights
from jppo.masked import masked_mean, masked_sum, whiten
from jppo.models import transformer
from jppo.models.lora import overlay
from jppo.types import Experience, Frozen, Params, Rollout, TrainState

Metrics = dict[str, Float[Array, ""]]


def run_trunk(
    cfg: ModelConfig, base: Params, tokens: Int[Array, "b s"], valid: Bool[Array, "b s"]
) -> Array:
    """Output of a frozen trunk `[b, s, d]`; the token ids where there is none."""
    return transformer.hidden_states(cfg, base, tokens, valid) if base else tokens


def policy_outputs(
    setup: Setup,
    params: Params,
    base: Params,
    x: Array,
    valid: Bool[Array, "b s"],
    tokens: Int[Array, "b t"],
    *,
    entropy: bool,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"] | None, Array]:
    """(log-probs, entropies or None, hidden states `[b, t, d]`) of the responses."""
    t = tokens.shape[1]
    hidden = transformer.hidden_states(setup.actor, params, x, valid)[:, -t - 1 : -1]
    kernel, transposed = transformer.lm_kernel(params, base)
    chunk = setup.config.ppo.head_chunk
    logp, ent = chunked_logprobs(
        hidden,
        kernel,
        tokens,
        temperature=setup.config.sampling.temperature,
        chunk=chunk,
        transposed=transposed,
        softcap=setup.actor.final_softcap,
        entropy=entropy,
        # Logits that fit the allowance may also stay for the backward pass.
        remat=tokens.size > chunk,
    )
    return logp, ent, hidden


def critic_values(
    setup: Setup,
    critic: Params,
    x: Array | None,
    valid: Bool[Array, "b s"],
    actor_hidden: Float[Array, "b t d"],
) -> Float[Array, "b t"]:
    """V at the response positions: from the critic, or from a head on the actor."""
    if x is None:
        return transformer.scalar_head(critic, actor_hidden)
    t = actor_hidden.shape[1]
    hidden = transformer.hidden_states(setup.critic, critic, x, valid)
    return transformer.scalar_head(critic, hidden[:, -t - 1 : -1])


def position_scores(
    cfg: ModelConfig,
    params: Params,
    x: Array,
    valid: Bool[Array, "b s"],
    at: Int[Array, "b r"],
) -> Float[Array, "b r"]:
    """The scalar head at chosen positions of each row."""
    hidden = transformer.hidden_states(cfg, params, x, valid)
    return transformer.scalar_head(
        params, jnp.take_along_axis(hidden, at[..., None], axis=1)
    )


def sequence_scores(
    cfg: ModelConfig, params: Params, x: Array, valid: Bool[Array, "b s"]
) -> Float[Array, " b"]:
    """The scalar head at the last valid position of each row: a reward model's score.

    Padding may stand on either side. A row without a valid token gets its score at
    position 0, and must be masked out by the caller.
    """
    last = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1]), 0), axis=-1)
    return position_scores(cfg, params, x, valid, last[:, None])[:, 0]


def into_groups(tree: Any, parts: int) -> Any:
    """Leaves `[b, …]` as `[parts, b / parts, …]`.

    Row i goes to group i mod parts: on a mesh each group then spans all devices.
    """
    return jax.tree.map(
        lambda a: a.reshape(-1, parts, *a.shape[1:]).swapaxes(0, 1), tree
    )


def in_parts(fn: Callable[..., Any], parts: int, *batched: Any) -> Any:
    """Applies a batched function to `parts` equal groups of rows, one after another.

    Scoring uses the groups of the update, for its memory and, because equal shapes
    run equal kernels, for log-ratios that are exactly 0 before the first step.
    """
    if parts == 1:
        return fn(*batched)
    out = jax.lax.map(lambda args: fn(*args), into_groups(batched, parts))
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), out)


def shape_scores(
    setup: Setup, scores: Float[Array, " b"], stopped: Bool[Array, " b"]
) -> Float[Array, " b"]:
    """Scores after clipping and the rule for responses without a stop token."""
    cfg = setup.config.reward
    if cfg.clip is not None:
        scores = jnp.clip(scores, -cfg.clip, cfg.clip)
    if cfg.missing_eos_penalty is None:
        return scores
    return missing_eos(
        scores, stopped, penalty=cfg.missing_eos_penalty, mode=cfg.missing_eos_mode
    )


def forward_roles(
    setup: Setup, state: TrainState, frozen: Frozen, rollout: Rollout
) -> dict[str, Array]:
    """The forward passes of all roles over one group of rows."""
    tokens, valid = rollout.tokens, rollout.valid
    response = tokens[:, -rollout.mask.shape[1] :]
    shared = setup.config.critic.layout == "shared"
    actor_in = run_trunk(setup.actor, frozen.actor_base, tokens, valid)
    critic_in = (
        None if shared else run_trunk(setup.critic, frozen.critic_base, tokens, valid)
    )

    def policy(params, entropy):
        return policy_outputs(
            setup, params, frozen.actor_base, actor_in, valid, response, entropy=entropy
        )

    logp, entropy, hidden = policy(overlay(frozen.reference, state.actor), True)
    critic = overlay(frozen.critic_under, state.critic)
    out = {
        "actor_in": actor_in,
        "critic_in": critic_in,
        "logp": logp,
        "entropy": entropy,
        "logp_ref": policy(frozen.reference, False)[0],
        "values": critic_values(setup, critic, critic_in, valid, hidden),
    }
    if frozen.reward is not None:
        assert setup.reward is not None
        on_critic = frozen.reward_base is None
        x = critic_in if on_critic else tokens
        assert x is not None
        out["scores"] = sequence_scores(setup.reward, frozen.reward, x, valid)
    return out


def shaped_rewards(
    setup: Setup,
    beta: Float[Array, ""],
    logp: Float[Array, "b t"],
    logp_ref: Float[Array, "b t"],
    scores: Float[Array, " b"],
    rollout: Rollout,
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """(token rewards, the slots that hold one): KL penalty and the score."""
    cfg, mask = setup.config, rollout.mask
    rewards = kl_penalty(
        logp,
        logp_ref,
        shape_scores(setup, scores, rollout.stopped),
        mask,
        beta=beta if cfg.kl.where == "reward" else 0.0,
        estimator=cfg.kl.estimator,
        score_at=cfg.reward.score_at,
    )
    slots = score_mask(mask, score_at=cfg.reward.score_at)
    if cfg.reward.whiten:
        rewards = whiten(rewards, slots, shift_mean=False)
    return rewards, slots


def rollout_metrics(
    rollout: Rollout, made: Experience, out: dict[str, Array], shaped: Array
) -> Metrics:
    """Means over tokens or sequences; the keys are the words of the docs."""
    mask = made.mask
    present = mask.any(-1)
    k1 = kl_estimate(made.logp_old, made.logp_ref, estimator="k1")
    gap = jnp.abs(out["logp"] - rollout.logp)
    return {
        "scores": masked_mean(made.scores, present),
        "rewards": masked_mean(shaped, present),
        "kl": masked_mean(masked_sum(k1, mask, -1), present),
        "kl_token": masked_mean(k1, mask),
        "entropy": masked_mean(out["entropy"], mask),
        "lengths": masked_mean(rollout.lengths.astype(jnp.float32), present),
        "stopped_frac": masked_mean(rollout.stopped.astype(jnp.float32), present),
        "values": masked_mean(made.values_old, mask),
        "explained_variance": explained_variance(made.values_old, made.returns, mask),
        "sampler_gap_max": jnp.max(jnp.where(mask, gap, 0.0)),
        "sequences": present.sum(dtype=jnp.float32),
        "tokens": mask.sum(dtype=jnp.float32),
    }


def score(
    setup: Setup,
    state: TrainState,
    frozen: Frozen,
    rollout: Rollout,
    scores: Float[Array, " b"] | None = None,
) -> tuple[Experience, Metrics]:
    """Everything an update needs, from one rollout under the current parameters.

    scores: from a Python reward function, or None to ask the reward tree. Rows
    without a response (padding) count nowhere.
    Raises ValueError when there are neither scores nor a reward tree.
    """
    cfg, mask = setup.config.ppo, rollout.mask
    out = in_parts(
        lambda part: forward_roles(setup, state, frozen, part),
        cfg.minibatches * cfg.micro_batches,
        rollout,
    )
    if scores is None:
        if frozen.reward is None:
            raise ValueError("there is no reward model: scores must be given")
        scores = out["scores"]
    assert scores is not None
    # A weight-0 row may carry a NaN score: it must not touch even a sum.
    scores = jnp.where(mask.any(-1), scores.astype(jnp.float32), 0.0)
    logp = out["logp"] if cfg.logp_old == "recompute" else rollout.logp
    logp_old, logp_ref = (jnp.where(mask, x, 0.0) for x in (logp, out["logp_ref"]))
    values = jnp.where(mask.any(-1, keepdims=True), out["values"], 0.0)
    rewards, slots = shaped_rewards(
        setup, state.beta, logp_old, logp_ref, scores, rollout
    )
    advantages, returns = jax.vmap(
        lambda r, v, m: gae_scan(r, v, m, gamma=cfg.gamma, lam=cfg.lam)
    )(rewards, values, slots)
    advantages = jnp.where(mask, advantages, 0.0)
    weights = jnp.ones_like(logp_old)
    if cfg.tis_cap is not None:
        weights = tis_weights(out["logp"], rollout.logp, cap=cfg.tis_cap)
    made = Experience(
        actor_in=out["actor_in"],
        critic_in=out["critic_in"],
        tokens=rollout.tokens[:, -mask.shape[1] :],
        valid=rollout.valid,
        mask=mask,
        logp_old=logp_old,
        logp_ref=logp_ref,
        values_old=values,
        advantages=whiten(advantages, mask) if cfg.whiten_advantages else advantages,
        returns=returns,
        scores=scores,
        weights=weights,
    )
    shaped = masked_sum(rewards, slots, -1)
    metrics = rollout_metrics(rollout, made, out, shaped)
    return made, metrics | {"beta": state.beta}
