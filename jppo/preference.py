"""Learning from preferences: reward models (Bradley–Terry) and DPO, as pure losses.

    reward   −log σ(r_chosen − r_rejected − margin) + c (r_chosen + r_rejected)²
    DPO      −log σ(β (log-ratio of chosen − log-ratio of rejected))

A reward model scores each text once and meets it in every pair of the batch that is
known (the trick of InstructGPT, arXiv 2203.02155 §3.4). Objectives return (total,
count, sums): what is divided once, after micro-batches and devices were added up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jppo.config import ModelConfig
from jppo.fit_config import DPOLossConfig, PairLossConfig
from jppo.gradients import Metrics
from jppo.logprobs import chunked_logprobs
from jppo.losses import bradley_terry, dpo_loss
from jppo.masked import masked_sum
from jppo.models import transformer
from jppo.models.lora import overlay
from jppo.rollout import position_scores, run_trunk
from jppo.types import FitFrozen, PairBatch, Params, RankedBatch

Objective = tuple[Float[Array, ""], Float[Array, ""], Metrics]


def pair_loss(
    scores: Float[Array, " b"],
    better: Bool[Array, "b b"],
    margin: Float[Array, "b b"] | float = 0.0,
    *,
    center: float = 0.0,
) -> Objective:
    """(total, pairs, sums) over the pairs in which better[i, j] says that i beats j.

    margin: by how much at least (arXiv 2307.09288 §3.2.2). center: weight of
    (r_i + r_j)², which keeps scores around 0 (arXiv 2312.09244). Sums: right orders
    (ties count half), gaps, and both scores' squares as `center_loss`.
    """
    gap = scores[:, None] - scores[None, :]
    loss = bradley_terry(gap, jnp.zeros_like(gap), margin)
    both = jnp.square(scores[:, None] + scores[None, :])
    right = (gap > 0) + 0.5 * (gap == 0)
    total = masked_sum(loss, better) + center * masked_sum(both, better)
    return (
        total,
        better.sum(dtype=jnp.float32),
        {
            "pair_accuracy": masked_sum(right, better),
            "score_margin": masked_sum(gap, better),
        },
    )


def ranked_scores(
    cfg: ModelConfig, params: Params, frozen: FitFrozen, batch: RankedBatch
) -> Float[Array, "b r"]:
    """Score of each text at each position that is read."""
    whole = overlay(frozen.under, params)
    head = whole["head"]
    whole = whole | {"head": head | {"bias": jax.lax.stop_gradient(head["bias"])}}
    x = batch.x
    if frozen.base:
        x = run_trunk(cfg, frozen.base, x, batch.valid)
    return position_scores(cfg, whole, x, batch.valid, batch.at)


def reward_objective(
    cfg: ModelConfig,
    loss: PairLossConfig,
    params: Params,
    frozen: FitFrozen,
    batch: RankedBatch,
) -> Objective:
    """Bradley–Terry over the pairs of a batch of texts.

    A text keeps its rank wherever it is read (`batch.at`), so all b · r readings are
    compared. The head's bias moves no comparison, and it has no place in most files of
    reward models: it is not learnt.
    """
    scores = ranked_scores(cfg, params, frozen, batch)
    reads = scores.shape[1]
    wide = lambda a: jnp.repeat(jnp.repeat(a, reads, axis=0), reads, axis=1)  # noqa: E731
    margin = wide(batch.margin) if loss.margin else 0.0
    return pair_loss(scores.reshape(-1), wide(batch.better), margin, center=loss.center)


def response_logps(
    cfg: ModelConfig,
    params: Params,
    base: Params,
    x: Array,
    batch: PairBatch,
    chunk: int,
) -> Float[Array, " b2"]:
    """Σ log π over the completion of each row."""
    hidden = transformer.hidden_states(cfg, params, x, batch.valid)[:, :-1]
    kernel, transposed = transformer.lm_kernel(params, base)
    logp, _ = chunked_logprobs(
        hidden,
        kernel,
        batch.tokens[:, 1:],
        chunk=chunk,
        transposed=transposed,
        softcap=cfg.final_softcap,
        entropy=False,
    )
    return masked_sum(logp, batch.completion[:, 1:], -1)


def dpo_objective(
    cfg: ModelConfig,
    loss: DPOLossConfig,
    params: Params,
    frozen: FitFrozen,
    batch: PairBatch,
) -> Objective:
    """DPO over the pairs of a batch; the reference is the model as it began."""
    x = run_trunk(cfg, frozen.base, batch.tokens, batch.valid)
    whole = overlay(frozen.under, params)
    logp, ref = (
        response_logps(cfg, tree, frozen.base, x, batch, loss.head_chunk)
        for tree in (whole, frozen.under)
    )
    ref = jax.lax.stop_gradient(ref)
    if loss.kind == "ipo":  # a mean over tokens, as its authors advise
        lengths = jnp.maximum(batch.completion[:, 1:].sum(-1), 1)
        logp, ref = logp / lengths, ref / lengths
    pairs = logp[0::2], logp[1::2], ref[0::2], ref[1::2]
    losses = dpo_loss(
        *pairs, beta=loss.beta, kind=loss.kind, label_smoothing=loss.label_smoothing
    )
    real = batch.weight[0::2] > 0
    won = loss.beta * (pairs[0] - pairs[2])
    lost = loss.beta * (pairs[1] - pairs[3])
    return (
        masked_sum(losses, real),
        real.sum(dtype=jnp.float32),
        {
            "pair_accuracy": masked_sum((won > lost) + 0.5 * (won == lost), real),
            "reward_margin": masked_sum(won - lost, real),
            "chosen_logp": masked_sum(pairs[0], real),
            "rejected_logp": masked_sum(pairs[1], real),
        },
    )
