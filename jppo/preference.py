"""Reward models from preferences: Bradley–Terry over all ordered pairs of a batch.

    loss = −mean log σ(r_chosen − r_rejected − margin)

Each text is scored once and takes part in every pair of its batch (the trick of
InstructGPT, arXiv 2203.02155 §3.4). The score is the scalar head at the last token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jppo.config import ModelConfig
from jppo.losses import bradley_terry
from jppo.masked import masked_mean
from jppo.rollout import Metrics, position_scores
from jppo.types import Params


def pair_loss(
    scores: Float[Array, " b"],
    better: Bool[Array, "b b"],
    margin: float | Float[Array, "b b"] = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """Mean Bradley–Terry loss over pairs; better[i, j] says that i beats j.

    margin: by how much at least, where it does (Llama 2, arXiv 2307.09288).
    Metrics: pair accuracy (ties count half) and the mean margin of the scores.
    """
    gap = scores[:, None] - scores[None, :]
    loss = bradley_terry(gap, jnp.zeros_like(gap), margin)
    right = (gap > 0) + 0.5 * (gap == 0)
    return masked_mean(loss, better), {
        "pair_accuracy": masked_mean(right, better),
        "score_margin": masked_mean(gap, better),
    }


def reward_step(
    cfg: ModelConfig,
    tx: optax.GradientTransformation,
    params: Params,
    opt_state: Any,
    x: Array,
    valid: Bool[Array, "b s"],
    at: Int[Array, "b r"],
    better: Bool[Array, "b b"],
    margin: Float[Array, "b b"] | None = None,
) -> tuple[Params, Any, Metrics]:
    """One optimizer step of a reward model on one batch of texts.

    x: token ids, or the output of the frozen trunk below `params`. at: positions of
    each text that are read, the last one among them; a text keeps its rank at every
    one, so all b · r readings are compared.
    """
    reads = at.shape[1]

    def loss_fn(params):
        scores = position_scores(cfg, params, x, valid, at).reshape(-1)
        wide = lambda x: jnp.repeat(jnp.repeat(x, reads, axis=0), reads, axis=1)  # noqa: E731
        return pair_loss(scores, wide(better), 0.0 if margin is None else wide(margin))

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    norm = optax.tree.norm(grads)
    updates, new_state = tx.update(grads, opt_state, params)
    ok = jnp.isfinite(norm)
    new, new_state = jax.tree.map(
        lambda a, b: jnp.where(ok, a, b),
        (optax.apply_updates(params, updates), new_state),
        (params, opt_state),
    )
    return (
        new,
        new_state,
        metrics
        | {
            "loss": loss,
            "grad_norm": norm,
            "skipped": 1.0 - ok.astype(jnp.float32),
        },
    )
