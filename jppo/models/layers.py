"""The decoder's block, and what differs between families inside it.

`ModelConfig` names each difference (norms, rotary embeddings, windows, biases, soft
caps); here every one is a line where it acts. Blocks are pure: they know nothing of
how many there are, of param trees cut in two, or of sampling.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jppo.config import ModelConfig
from jppo.sharding import BATCH, constrain

MASKED = -1e30  # finite, so that a row with nothing to attend to is not NaN
ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


class Cache(NamedTuple):
    """Keys and values of one layer, a column a position: `[b, s, k, e]` each."""

    k: Float[Array, "b s k e"]
    v: Float[Array, "b s k e"]


class View(NamedTuple):
    """What a kind of layer sees: rotations of the positions, and the columns."""

    cos: Float[Array, "b t 1 e2"] | None  # None: no rotary embedding
    sin: Float[Array, "b t 1 e2"] | None
    mask: Bool[Array, "b t s"]


def layer_kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """Kind of each layer of the whole model."""
    return cfg.layers or ("sliding" if cfg.window else "full",) * cfg.n_layers


def frequencies(cfg: ModelConfig, kind: str) -> np.ndarray:
    """Rotary frequencies of a kind of layer, θ^(−2i/e) and their scaling, `[e/2]`.

    Linear scaling divides all (arXiv 2306.15595). Llama 3's divides those whose
    wavelength exceeds original / low, keeps those below original / high, and goes
    from one to the other between (arXiv 2407.21783 §3.4.2).
    """
    local = cfg.rope_theta_local if "sliding" in kind else None
    theta = cfg.rope_theta if local is None else local
    dims = cfg.rope_dims or cfg.head_dim
    freqs = theta ** (-np.arange(dims // 2, dtype=np.float64) / (dims // 2))
    if local is not None or not cfg.rope_scaling:
        return freqs
    name, factor, *rest = cfg.rope_scaling
    if name == "linear":
        return freqs / factor
    low, high, original = rest
    turns = original * freqs / (2 * np.pi)  # in the original window
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * freqs / factor + smooth * freqs


def view(
    cfg: ModelConfig,
    kind: str,
    positions: Int[Array, "b t"],
    mask: Bool[Array, "b t s"],
    distance: Int[Array, "t s"],
) -> View:
    """The view of one kind of layer. distance: columns from a key to its query."""
    if "sliding" in kind:
        if cfg.window is None:
            raise ValueError(f"a {kind} layer needs ModelConfig.window")
        mask = mask & (distance < cfg.window)
    if cfg.positions == "learned":
        return View(None, None, mask)
    freqs = jnp.asarray(frequencies(cfg, kind), jnp.float32)
    if "nope" in kind:  # the identity rotation
        freqs = jnp.zeros_like(freqs)
    angles = (positions[..., None].astype(jnp.float32) * freqs)[:, :, None]
    return View(jnp.cos(angles), jnp.sin(angles), mask)


def rotate(x_bthe: Array, at: View) -> Array:
    """Rotates the two halves of the rotary dims of each head (the Hugging Face
    pairing), in f32; dims after those pass."""
    if at.cos is None or at.sin is None:
        return x_bthe
    half = at.cos.shape[-1]
    x = x_bthe.astype(jnp.float32)
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    turned = [a * at.cos - b * at.sin, b * at.cos + a * at.sin]
    parts = turned if rest.shape[-1] == 0 else [*turned, rest]
    return jnp.concatenate(parts, axis=-1).astype(x_bthe.dtype)


def attend(
    q_bthe: Array,
    k_bske: Array,
    v_bske: Array,
    mask_bts: Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> Array:
    """softmax(q kᵀ · scale) v with grouped queries; scores and softmax in f32."""
    b, t, h, e = q_bthe.shape
    kv_heads = k_bske.shape[2]
    q = q_bthe.reshape(b, t, kv_heads, h // kv_heads, e) * scale
    scores = jnp.einsum(
        "btkge,bske->bkgts", q, k_bske, preferred_element_type=jnp.float32
    )
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask_bts[:, None, None], scores, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v_bske.dtype)
    return jnp.einsum("bkgts,bske->btkge", probs, v_bske).reshape(b, t, h, e)


class Norm(nn.Module):
    """x / √(mean x² + ε) · scale, or LayerNorm with its bias; computed in f32."""

    eps: float
    offset: float = 0.0
    center: bool = False  # LayerNorm

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.constant(1 - self.offset), shape)
        y = x.astype(jnp.float32)
        if self.center:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * (scale + self.offset if self.offset else scale)
        if self.center:
            y = y + self.param("bias", nn.initializers.zeros, shape)
        return y.astype(x.dtype)


def make_norm(cfg: ModelConfig, name: str | None = None) -> Norm:
    """A norm over the model dimension, as this family has it."""
    return Norm(cfg.norm_eps, cfg.norm_offset, cfg.norm == "layer", name=name)


class Dense(nn.Module):
    """x · W (+ b) over the last `axes` axes of x, W of shape `[*inputs, *features]`.

    All tokens are rows of one matrix: with batch and time apart, XLA transposes the
    activations by copy for every weight gradient (a third of a step on CPUs).
    Low-rank factors in the tree add α/r · (x · A) · B (arXiv 2106.09685).
    """

    features: tuple[int, ...]
    axes: int = 1
    dtype: str = "float32"
    bias: bool = False
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        lead, inputs = x.shape[: -self.axes], x.shape[-self.axes :]
        kernel = self.param(
            "kernel", nn.initializers.normal(0.02), (*inputs, *self.features)
        )
        n = math.prod(inputs)
        flat = x.reshape(-1, n)
        y = flat @ kernel.reshape(n, -1).astype(self.dtype)
        if self.has_variable("params", "lora_a"):
            a = self.get_variable("params", "lora_a").reshape(n, -1)
            b = self.get_variable("params", "lora_b")
            b = b.reshape(b.shape[0], -1)
            low = flat @ a.astype(self.dtype) @ b.astype(self.dtype)
            y = y + self.lora_scale * low
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, self.features)
            y = y + bias.reshape(-1).astype(self.dtype)
        return y.reshape(*lead, *self.features)


def make_dense(cfg: ModelConfig, features, *, name: str, axes=1, bias=False) -> Dense:
    return Dense(features, axes, cfg.dtype, bias, cfg.lora_scale, name=name)


class Attention(nn.Module):
    """Grouped-query attention; with a cache, writes its column(s) first."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, at: View, cache: Cache | None, column):
        cfg = self.cfg

        def project(name, heads):
            shape = (heads, cfg.head_dim)
            return make_dense(cfg, shape, name=name, bias=cfg.qkv_bias)(x)

        def normed(name, y):
            if cfg.qk_norm == "none":
                return y
            flat = y if cfg.qk_norm == "head" else y.reshape(*y.shape[:2], -1)
            norm = Norm(cfg.norm_eps, cfg.norm_offset, name=f"{name}_norm")
            return norm(flat).reshape(y.shape)

        q = rotate(normed("q", project("q", cfg.n_heads)), at)
        k = rotate(normed("k", project("k", cfg.n_kv_heads)), at)
        v = project("v", cfg.n_kv_heads)
        if cache is not None:
            where = (0, column, 0, 0)
            k = jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), where)
            v = jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), where)
            cache = Cache(k, v)
        scale = cfg.query_scale or cfg.head_dim**-0.5
        out = attend(q, k, v, at.mask, scale=scale, softcap=cfg.attn_softcap)
        o = make_dense(cfg, (cfg.d_model,), name="o", axes=2, bias=cfg.o_bias)
        return o(out), cache


class MLP(nn.Module):
    """(act(x W_gate) ⊙ x W_up) W_down, or act(x W_up) W_down without a gate."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x):
        cfg, act = self.cfg, ACTIVATIONS[self.cfg.act]

        def dense(name, width):
            return make_dense(cfg, (width,), name=name, bias=cfg.mlp_bias)

        if cfg.gated:
            gate = dense("gate", cfg.d_mlp)(x)
            up = dense("up", cfg.d_mlp)(x)
            return dense("down", cfg.d_model)(act(gate) * up)
        return dense("down", cfg.d_model)(act(dense("up", cfg.d_mlp)(x)))


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x); norms before, after, or both."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, at: View, cache: Cache | None = None, column=0):
        cfg = self.cfg

        def before(name, y):
            return y if cfg.norm_at == "post" else make_norm(cfg, f"{name}_norm")(y)

        def after(name, y):
            return y if cfg.norm_at == "pre" else make_norm(cfg, f"{name}_post")(y)

        attention, mlp = Attention(cfg, name="attn"), MLP(cfg, name="mlp")
        h, cache = attention(before("attn", x), at, cache, column)
        h = x + after("attn", h)
        out = h + after("mlp", mlp(before("mlp", x if cfg.parallel else h)))
        return constrain(out, BATCH, None, None), cache
