"""The sampler: prefill, then one cached step a token until every row has stopped.

Shapes are static. Prompts are left-padded, so each step writes one cache column for
all rows. The caches are carried through `lax.while_loop` a layer each and updated in
place. A row has a key of its own: what it draws does not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from jppo import sampling
from jppo.config import ModelConfig, SamplingConfig
from jppo.logprobs import head_logits, token_logprobs
from jppo.models import transformer
from jppo.models.transformer import Cache
from jppo.sharding import BATCH, DECODE_RULES, constrain, constrain_tree
from jppo.types import Params, Prompts, Rollout


def unstack(params: Params) -> list[Params]:
    """The stacked blocks as a list: decoding reads each weight once a token, and a
    slice of a stacked array inside the loop would copy it first."""
    leaves, structure = jax.tree.flatten(params["blocks"])
    n = transformer.depth(params)
    return [structure.unflatten([leaf[i] for leaf in leaves]) for i in range(n)]


def forward_cached(
    cfg: ModelConfig,
    params: Params,
    layers: list[Params],
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    mask_bts: Bool[Array, "b t s"],
    caches: tuple[Cache, ...],
    column: Any,
) -> tuple[Array, tuple[Cache, ...]]:
    """Hidden state of the last of `tokens` `[b, d]`, with its columns cached."""
    x = transformer.embed(cfg, params, tokens)
    rope = transformer.rope_table(cfg, positions)
    written = []
    for layer, cache in zip(layers, caches, strict=True):
        x, cache = transformer.Block(cfg).apply(
            {"params": layer}, x, rope, mask_bts, cache, column
        )
        written.append(cache)
    return transformer.final_norm(cfg, params, x[:, -1]), tuple(written)


def empty_caches(cfg: ModelConfig, b: int, s: int) -> tuple[Cache, ...]:
    """Zeroed caches of `s` columns, one a layer, in the compute dtype."""
    zeros = jnp.zeros((b, s, cfg.n_kv_heads, cfg.head_dim), jnp.dtype(cfg.dtype))
    zeros = constrain(zeros, BATCH, None, "tensor", None)
    return tuple(Cache(zeros, zeros) for _ in range(cfg.n_layers))


def generate(
    cfg: ModelConfig,
    params: Params,
    prompts: Prompts,
    key: Key[Array, ""],
    *,
    settings: SamplingConfig,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Rollout:
    """Draws one response a prompt.

    params: a whole model. key: of this step; row i uses fold_in(key, prompts.row[i]),
    and its token t fold_in(that, t). settings, stop_ids and pad_id are static. A
    response ends with its first stop token, which is valid; later slots hold pad_id.
    Log-probs are of the full vocabulary at the sampling temperature (at temperature
    0, greedy decoding, of the untempered distribution).
    """
    b, p = prompts.tokens.shape
    t = settings.max_new_tokens
    params = constrain_tree(params, DECODE_RULES)
    layers, (kernel, transposed) = unstack(params), transformer.lm_kernel(params)
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, prompts.row)
    stops = jnp.asarray(stop_ids, jnp.int32)
    offset = prompts.mask.sum(-1, dtype=jnp.int32)

    def draw(hidden, i):
        logits = head_logits(hidden, kernel, transposed=transposed)
        if settings.temperature == 0:
            token = sampling.greedy(logits)
            return token, token_logprobs(logits, token)
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, i)
        token = sampling.sample(
            keys,
            logits,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
        )
        return token, token_logprobs(logits, token, temperature=settings.temperature)

    def record(out, i, token, logp, alive):
        tokens, logps, mask, stop_index = out
        hit = (token[:, None] == stops[None]) & alive[:, None]
        column = (slice(None), i)
        out = (
            tokens.at[column].set(jnp.where(alive, token, pad_id)),
            logps.at[column].set(jnp.where(alive, logp, 0.0)),
            mask.at[column].set(alive),
            jnp.where(hit.any(-1), jnp.argmax(hit, -1).astype(jnp.int32), stop_index),
        )
        return out, alive & ~hit.any(-1)

    def step(carry):
        i, out, alive, valid, caches = carry
        token = jax.lax.dynamic_slice_in_dim(out[0], i - 1, 1, axis=1)
        valid = jax.lax.dynamic_update_slice(valid, alive[:, None], (0, p + i - 1))
        positions = (offset + i - 1)[:, None]
        hidden, caches = forward_cached(
            cfg, params, layers, token, positions, valid[:, None], caches, p + i - 1
        )
        out, alive = record(out, i, *draw(hidden, i), alive)
        return i + 1, out, alive, valid, caches

    def running(carry):
        return (carry[0] < t) & carry[2].any()

    # The last slot's token is never fed back, so the cache ends one column before it.
    s = p + t - 1
    valid = jnp.pad(prompts.mask, ((0, 0), (0, t - 1)))
    causal = jnp.arange(s)[None] <= jnp.arange(p)[:, None]
    hidden, caches = forward_cached(
        cfg,
        params,
        layers,
        prompts.tokens,
        transformer.positions_of(prompts.mask),
        causal & valid[:, None],
        empty_caches(cfg, b, s),
        0,
    )
    out = (
        jnp.full((b, t), pad_id, jnp.int32),
        jnp.zeros((b, t), jnp.float32),
        jnp.zeros((b, t), bool),
        jnp.full((b,), -1, jnp.int32),
    )
    # A padding row, or one without a prompt token, never starts.
    alive = (prompts.weight > 0) & prompts.mask.any(-1)
    out, alive = record(out, 0, *draw(hidden, 0), alive)
    carry = (jnp.int32(1), out, alive, valid, caches)
    _, (tokens, logp, mask, stop_index), *_ = jax.lax.while_loop(running, step, carry)
    return Rollout(
        tokens=jnp.concatenate([prompts.tokens, tokens], -1),
        valid=jnp.concatenate([prompts.mask, mask], -1),
        mask=mask,
        logp=logp,
        stopped=stop_index >= 0,
        stop_index=stop_index,
        lengths=mask.sum(-1, dtype=jnp.int32),
    )
