"""The sampler: prefill, then one cached step a token until every row has stopped.

Shapes are static. Prompts are left-padded, so each step writes one cache column for
all rows. The caches are carried through `lax.while_loop` a layer each and updated in
place. A row has a key of its own: what it draws does not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jppo import sampling
from jppo.config import ModelConfig, SamplingConfig
from jppo.logprobs import head_logits, token_logprobs
from jppo.models import transformer
from jppo.models.layers import Block, Cache, layer_kinds
from jppo.sharding import BATCH, DECODE_RULES, HEADS, constrain, constrain_tree
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
    valid: Bool[Array, "b s"],
    caches: tuple[Cache, ...],
    column: Any,
) -> tuple[Array, tuple[Cache, ...]]:
    """Hidden state of the last of `tokens` `[b, d]`, with its columns cached.

    column: the cache column of the first token. valid: columns that hold a token.
    """
    x = transformer.embed(cfg, params, tokens, positions)
    queries = column + jnp.arange(tokens.shape[1])
    distance = queries[:, None] - jnp.arange(valid.shape[1])[None]
    mask_bts = (distance >= 0) & valid[:, None]
    at = transformer.views(cfg, positions, mask_bts, distance)
    written = []
    for layer, kind, cache in zip(layers, layer_kinds(cfg), caches, strict=True):
        x, cache = Block(cfg).apply({"params": layer}, x, at[kind], cache, column)
        written.append(cache)
    return transformer.final_norm(cfg, params, x[:, -1]), tuple(written)


def empty_caches(cfg: ModelConfig, b: int, s: int) -> tuple[Cache, ...]:
    """Zeroed caches of `s` columns, one a layer, in the compute dtype."""
    zeros = jnp.zeros((b, s, cfg.n_kv_heads, cfg.head_dim), jnp.dtype(cfg.dtype))
    zeros = constrain(zeros, BATCH, None, HEADS, None)
    return tuple(Cache(zeros, zeros) for _ in range(cfg.n_layers))


class Responses(NamedTuple):
    """What has been drawn so far; slots after a row's stop token are never written."""

    tokens: Int[Array, "b t"]
    logp: Float[Array, "b t"]
    mask: Bool[Array, "b t"]
    stop_index: Int[Array, " b"]
    alive: Bool[Array, " b"]

    @classmethod
    def empty(cls, alive: Bool[Array, " b"], t: int, pad_id: int) -> Responses:
        b = alive.shape[0]
        return cls(
            tokens=jnp.full((b, t), pad_id, jnp.int32),
            logp=jnp.zeros((b, t), jnp.float32),
            mask=jnp.zeros((b, t), bool),
            stop_index=jnp.full((b,), -1, jnp.int32),
            alive=alive,
        )

    def add(self, i: Any, token: Array, logp: Array, stops: Array) -> Responses:
        """Writes slot i of the rows that are alive; a stop token ends its row."""
        column, alive = (slice(None), i), self.alive
        hit = (token[:, None] == stops[None]) & alive[:, None]
        stop = jnp.argmax(hit, -1).astype(jnp.int32)
        return Responses(
            tokens=self.tokens.at[column].set(
                jnp.where(alive, token, self.tokens[column])
            ),
            logp=self.logp.at[column].set(jnp.where(alive, logp, 0.0)),
            mask=self.mask.at[column].set(alive),
            stop_index=jnp.where(hit.any(-1), stop, self.stop_index),
            alive=alive & ~hit.any(-1),
        )


def draw(
    hidden: Float[Array, "b d"],
    head: tuple[Array, bool],
    row_keys: Key[Array, " b"],
    i: Any,
    settings: SamplingConfig,
    softcap: float | None = None,
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """(token, its log-prob over the full vocabulary) of slot i for every row."""
    logits = head_logits(hidden, head[0], transposed=head[1], softcap=softcap)
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


def prefill(
    cfg: ModelConfig, params: Params, layers: list[Params], prompts: Prompts, t: int
) -> tuple[Array, tuple[Cache, ...], Bool[Array, "b s"]]:
    """(last hidden state, caches, valid columns) after the prompts.

    The last slot's token is never fed back, so the cache ends one column before it.
    """
    b, p = prompts.tokens.shape
    valid = jnp.pad(prompts.mask, ((0, 0), (0, t - 1)))
    hidden, caches = forward_cached(
        cfg,
        params,
        layers,
        prompts.tokens,
        transformer.positions_of(prompts.mask),
        valid,
        empty_caches(cfg, b, p + t - 1),
        0,
    )
    return hidden, caches, valid


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
    p, t = prompts.tokens.shape[1], settings.max_new_tokens
    # Cast first: half the bytes are gathered, and read again at every token.
    params = constrain_tree(transformer.as_frozen(params, cfg.dtype), DECODE_RULES)
    layers, head = unstack(params), transformer.lm_kernel(params)
    cap = cfg.final_softcap
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, prompts.row)
    stops = jnp.asarray(stop_ids or (-1,), jnp.int32)  # −1 is no token
    offset = prompts.mask.sum(-1, dtype=jnp.int32)

    def step(carry):
        i, out, valid, caches = carry
        token = jax.lax.dynamic_slice_in_dim(out.tokens, i - 1, 1, axis=1)
        column, alive = p + i - 1, out.alive[:, None]
        valid = jax.lax.dynamic_update_slice(valid, alive, (0, column))
        positions = (offset + i - 1)[:, None]
        hidden, caches = forward_cached(
            cfg, params, layers, token, positions, valid, caches, column
        )
        out = out.add(i, *draw(hidden, head, row_keys, i, settings, cap), stops)
        return i + 1, out, valid, caches

    def running(carry):
        return (carry[0] < t) & carry[1].alive.any()

    hidden, caches, valid = prefill(cfg, params, layers, prompts, t)
    # A padding row, or one without a prompt token, never starts.
    alive = (prompts.weight > 0) & prompts.mask.any(-1)
    out = Responses.empty(alive, t, pad_id)
    out = out.add(0, *draw(hidden, head, row_keys, 0, settings, cap), stops)
    carry = (jnp.int32(1), out, valid, caches)
    _, out, *_ = jax.lax.while_loop(running, step, carry)
    return Rollout(
        tokens=jnp.concatenate([prompts.tokens, out.tokens], -1),
        valid=jnp.concatenate([prompts.mask, out.mask], -1),
        mask=out.mask,
        logp=out.logp,
        stopped=out.stop_index >= 0,
        stop_index=out.stop_index,
        lengths=out.mask.sum(-1, dtype=jnp.int32),
    )
