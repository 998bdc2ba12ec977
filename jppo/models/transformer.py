"""One decoder for the Llama family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Linen describes one `Block`; plain functions stack it. A param tree *is* the part of
the model that it holds: `{"embed", "blocks"}` is a trunk, `{"blocks", "norm"}` the
layers above it, and all four keys a whole model. `hidden_states` runs what the tree
holds, so a frozen trunk is evaluated once and several roles go on from its output.

Blocks are stored stacked on a leading layer axis and run by `lax.scan`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jppo.config import ModelConfig
from jppo.logprobs import head_logits
from jppo.sharding import BATCH, constrain

Params = dict[str, Any]
SHALLOW = 4  # blocks; a stack of no more is unrolled whole unless told otherwise
MASKED = -1e30  # finite, so that a row with nothing to attend to is not NaN


class Cache(NamedTuple):
    """Keys and values of one layer, a column a position: `[b, s, k, e]` each."""

    k: Float[Array, "b s k e"]
    v: Float[Array, "b s k e"]


def positions_of(mask: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """Position of each token among the valid ones: cumsum(mask) − mask."""
    m = mask.astype(jnp.int32)
    return jnp.cumsum(m, axis=-1) - m


def rope_table(
    cfg: ModelConfig, positions: Int[Array, "b t"]
) -> tuple[Float[Array, "b t 1 e2"], Float[Array, "b t 1 e2"]]:
    """cos and sin of position · θ^(−2i/e), for the first half of the head dim."""
    half = cfg.head_dim // 2
    freqs = cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * freqs
    return jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]


def rotate(x_bthe: Array, rope: tuple[Array, Array]) -> Array:
    """Rotates the two halves of each head (the Hugging Face pairing), in f32."""
    cos, sin = rope
    a, b = jnp.split(x_bthe.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out.astype(x_bthe.dtype)


def attend(q_bthe: Array, k_bske: Array, v_bske: Array, mask_bts: Array) -> Array:
    """softmax(q kᵀ / √e) v with grouped queries; scores and softmax in f32."""
    b, t, h, e = q_bthe.shape
    kv_heads = k_bske.shape[2]
    q = q_bthe.reshape(b, t, kv_heads, h // kv_heads, e) * (e**-0.5)
    scores = jnp.einsum(
        "btkge,bske->bkgts", q, k_bske, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask_bts[:, None, None], scores, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v_bske.dtype)
    return jnp.einsum("bkgts,bske->btkge", probs, v_bske).reshape(b, t, h, e)


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · scale, computed in f32."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * scale).astype(x.dtype)


class Dense(nn.Module):
    """x · W over the last `axes` axes of x, W of shape `[*inputs, *features]`.

    All tokens are rows of one matrix: with batch and time apart, XLA transposes the
    activations by copy for every weight gradient (a third of a step on CPUs).
    """

    features: tuple[int, ...]
    axes: int = 1
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        lead, inputs = x.shape[: -self.axes], x.shape[-self.axes :]
        kernel = self.param(
            "kernel", nn.initializers.normal(0.02), (*inputs, *self.features)
        )
        n = math.prod(inputs)
        w = kernel.reshape(n, -1).astype(self.dtype)
        return (x.reshape(-1, n) @ w).reshape(*lead, *self.features)


class Attention(nn.Module):
    """Rotary grouped-query attention; with a cache, writes its column(s) first."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, rope, mask_bts, cache: Cache | None, column):
        cfg = self.cfg
        heads, kv_heads = (cfg.n_heads, cfg.head_dim), (cfg.n_kv_heads, cfg.head_dim)
        q = rotate(Dense(heads, dtype=cfg.dtype, name="q")(x), rope)
        k = rotate(Dense(kv_heads, dtype=cfg.dtype, name="k")(x), rope)
        v = Dense(kv_heads, dtype=cfg.dtype, name="v")(x)
        if cache is not None:
            at = (0, column, 0, 0)
            k = jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), at)
            v = jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), at)
            cache = Cache(k, v)
        out = attend(q, k, v, mask_bts)
        return Dense((cfg.d_model,), 2, cfg.dtype, name="o")(out), cache


class MLP(nn.Module):
    """SwiGLU: (silu(x W_gate) ⊙ x W_up) W_down."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x):
        wide, dtype = (self.cfg.d_mlp,), self.cfg.dtype
        gate = Dense(wide, dtype=dtype, name="gate")(x)
        up = Dense(wide, dtype=dtype, name="up")(x)
        return Dense((self.cfg.d_model,), dtype=dtype, name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, rope, mask_bts, cache: Cache | None = None, column=0):
        eps = self.cfg.norm_eps
        h, cache = Attention(self.cfg, name="attn")(
            RMSNorm(eps, name="attn_norm")(x), rope, mask_bts, cache, column
        )
        x = x + h
        x = x + MLP(self.cfg, name="mlp")(RMSNorm(eps, name="mlp_norm")(x))
        return constrain(x, BATCH, None, None), cache


def init_params(cfg: ModelConfig, key: Array, *, scalar_head: bool = False) -> Params:
    """Fresh f32 params of a whole decoder: N(0, .02) weights, unit norms.

    With `scalar_head` a value or reward head takes the place of the LM head.
    """
    k_embed, k_blocks, k_head = jax.random.split(key, 3)
    x = jnp.zeros((1, 1, cfg.d_model), jnp.float32)
    mask = jnp.ones((1, 1, 1), bool)
    rope = rope_table(cfg, jnp.zeros((1, 1), jnp.int32))
    init = lambda k: Block(cfg).init(k, x, rope, mask)["params"]  # noqa: E731
    params = {
        "embed": {
            "embedding": 0.02
            * jax.random.normal(k_embed, (cfg.vocab_size, cfg.d_model), jnp.float32)
        },
        "blocks": jax.vmap(init)(jax.random.split(k_blocks, cfg.n_layers)),
        "norm": {"scale": jnp.ones((cfg.d_model,), jnp.float32)},
    }
    if scalar_head:
        params["head"] = init_head(k_head, cfg.d_model)
    elif not cfg.tie_embeddings:
        kernel = jax.random.normal(k_head, (cfg.d_model, cfg.vocab_size), jnp.float32)
        params["lm_head"] = {"kernel": 0.02 * kernel}
    return params


def init_head(key: Array, d_model: int) -> Params:
    """Scalar head, weights N(0, 1/√(d+1)), bias 0 (arXiv 2403.17031, detail 11)."""
    std = (d_model + 1) ** -0.5
    kernel = std * jax.random.normal(key, (d_model, 1), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros((1,), jnp.float32)}


def depth(params: Params) -> int:
    """Number of blocks that this tree holds."""
    return len(params["blocks"]["mlp_norm"]["scale"]) if "blocks" in params else 0


def split_params(params: Params, layers: int | None) -> tuple[Params, Params]:
    """Cuts a whole model above block `layers`: (trunk with embedding, the rest).

    `None` gives an empty trunk: everything, embedding included, is in the rest. With
    `layers` equal to the depth the rest is the final norm and the head alone.
    """
    if layers is None:
        return {}, params
    if not 0 <= layers <= depth(params):
        raise ValueError(f"cannot cut {layers} layers off a model of {depth(params)}")
    trunk = {"embed": params["embed"]}
    rest = {k: v for k, v in params.items() if k not in ("embed", "blocks")}
    if layers > 0:
        trunk["blocks"] = jax.tree.map(lambda a: a[:layers], params["blocks"])
    if layers < depth(params):
        rest["blocks"] = jax.tree.map(lambda a: a[layers:], params["blocks"])
    return trunk, rest


def merge_params(trunk: Params, rest: Params) -> Params:
    """The inverse of `split_params`."""
    if not trunk:
        return rest
    parts = [tree["blocks"] for tree in (trunk, rest) if "blocks" in tree]
    if len(parts) == 1:
        return {**rest, **trunk}
    blocks = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *parts)
    return {**rest, "embed": trunk["embed"], "blocks": blocks}


def embed(cfg: ModelConfig, params: Params, tokens: Int[Array, "b t"]) -> Array:
    """Rows of the embedding, in the compute dtype: `[b, t, d]`."""
    x = params["embed"]["embedding"][tokens].astype(jnp.dtype(cfg.dtype))
    return constrain(x, BATCH, None, None)


def run_blocks(
    cfg: ModelConfig, blocks: Params, x: Array, mask: Bool[Array, "b t"]
) -> Float[Array, "b t d"]:
    """Stacked blocks over hidden states, one after another by `lax.scan`.

    A scan stacks what each block keeps for the backward pass. A shallow stack runs
    faster without, unrolled whole; in a deep one the time to compile would not pay.
    """
    t, n = mask.shape[1], depth({"blocks": blocks})
    unroll = cfg.unroll or (n if n <= SHALLOW else 1)
    rope = rope_table(cfg, positions_of(mask))
    mask_bts = jnp.tril(jnp.ones((t, t), bool)) & mask[:, None, :]

    def body(h, layer):
        return Block(cfg).apply({"params": layer}, h, rope, mask_bts)[0], None

    if cfg.remat:
        body = jax.checkpoint(body, prevent_cse=False)
    return jax.lax.scan(body, x, blocks, unroll=unroll)[0]


def final_norm(cfg: ModelConfig, params: Params, x: Array) -> Array:
    """The last RMSNorm, which the heads read."""
    return jnp.asarray(RMSNorm(cfg.norm_eps).apply({"params": params["norm"]}, x))


def hidden_states(
    cfg: ModelConfig, params: Params, x: Array, mask: Bool[Array, "b t"]
) -> Float[Array, "b t d"]:
    """Runs the part of the model that `params` holds, causally, over valid tokens.

    x: token ids `[b, t]` where the tree has an embedding, else the output `[b, t, d]`
    of the trunk below. mask: False at padding, on either side. The result is
    normalised when the tree has the final norm.
    """
    if ("embed" in params) != (x.ndim == 2):
        raise ValueError(
            "a tree with an embedding takes token ids [b, t], one without takes hidden"
            f" states [b, t, d]; got keys {sorted(params)} and shape {x.shape}"
        )
    if "embed" in params:
        x = embed(cfg, params, x)
    if "blocks" in params:
        x = run_blocks(cfg, params["blocks"], x, mask)
    return final_norm(cfg, params, x) if "norm" in params else x


def lm_kernel(*trees: Params) -> tuple[Array, bool]:
    """(kernel, transposed): `[d, v]` of an own head, or the tied embedding `[v, d]`."""
    for tree in trees:
        if "lm_head" in tree:
            return tree["lm_head"]["kernel"], False
    for tree in trees:
        if "embed" in tree:
            return tree["embed"]["embedding"], True
    raise ValueError("no LM head and no embedding in these trees")


def logits(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "b t"],
    mask: Bool[Array, "b t"],
) -> Float[Array, "b t v"]:
    """f32 logits of a whole model at every position (for evaluation and tests)."""
    kernel, transposed = lm_kernel(params)
    hidden = hidden_states(cfg, params, tokens, mask)
    return head_logits(hidden, kernel, transposed=transposed)


def scalar_head(params: Params, hidden: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """hidden · w + bias in f32: a value or a reward a position."""
    head = params["head"]
    return (hidden.astype(jnp.float32) @ head["kernel"] + head["bias"])[..., 0]
