"""Supervised fine-tuning: the log-likelihood of the tokens that are to be learnt.

loss = −Σ_m log π(token) / Σ m        m: tokens of completions, over the batch
"""

from __future__ import annotations

import jax.numpy as jnp

from jppo.config import ModelConfig
from jppo.logprobs import chunked_logprobs
from jppo.masked import masked_sum
from jppo.models import transformer
from jppo.models.lora import overlay
from jppo.preference import Objective
from jppo.types import FitFrozen, Params, TokenBatch


def sft_objective(
    cfg: ModelConfig,
    head_chunk: int,
    params: Params,
    frozen: FitFrozen,
    batch: TokenBatch,
) -> Objective:
    """(total negative log-likelihood, tokens, sums) of one batch of texts.

    The first token of a segment has nothing before it and is never predicted.
    """
    whole = overlay(frozen.under, params)
    x = batch.tokens
    for tree in (frozen.base, whole) if frozen.base else (whole,):
        x = transformer.hidden_states(cfg, tree, x, batch.valid, batch.segments)
    kernel, transposed = transformer.lm_kernel(whole, frozen.base)
    logp, _ = chunked_logprobs(
        x[:, :-1],
        kernel,
        batch.tokens[:, 1:],
        chunk=head_chunk,
        transposed=transposed,
        softcap=cfg.final_softcap,
        entropy=False,
    )
    follows = batch.segments[:, 1:] == batch.segments[:, :-1]
    mask = batch.trained[:, 1:] & batch.valid[:, 1:] & follows
    return -masked_sum(logp, mask), mask.sum(dtype=jnp.float32), {}
