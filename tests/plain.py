"""The decoder a second time, naive on purpose: one row, no padding, heads by a loop.

`xp` is numpy, for float64 forward passes, or jax.numpy, for gradients. It shares no
line with the library, so agreement means something.
"""

import numpy as np


def rms_norm(xp, x, scale, eps):
    return x / xp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rope(xp, x, theta):
    """Feature pairs (i, i + e/2) as complex numbers, turned by t · θ^(−2i/e)."""
    t, e = x.shape
    angle = np.outer(np.arange(t), theta ** (-2.0 * np.arange(e // 2) / e))
    z = (x[:, : e // 2] + 1j * x[:, e // 2 :]) * xp.exp(1j * angle)
    return xp.concatenate([z.real, z.imag], -1)


def softmax(xp, x):
    x = xp.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(xp, cfg, p, x):
    t, group = x.shape[0], cfg.n_heads // cfg.n_kv_heads
    out = 0.0
    for head in range(cfg.n_heads):
        q = rope(xp, x @ p["q"]["kernel"][:, head], cfg.rope_theta)
        k = rope(xp, x @ p["k"]["kernel"][:, head // group], cfg.rope_theta)
        v = x @ p["v"]["kernel"][:, head // group]
        logits = xp.where(np.tri(t, dtype=bool), q @ k.T / cfg.head_dim**0.5, -np.inf)
        out = out + softmax(xp, logits) @ v @ p["o"]["kernel"][head]
    return out


def mlp(xp, p, x):
    gate = x @ p["gate"]["kernel"]
    return (gate / (1 + xp.exp(-gate)) * (x @ p["up"]["kernel"])) @ p["down"]["kernel"]


def hidden(xp, cfg, params, tokens):
    """Normalised hidden states [t, d] of one row of tokens."""
    x = params["embed"]["embedding"][tokens]
    for n in range(cfg.n_layers):
        p = {part: tree for part, tree in params["blocks"].items()}
        p = _layer(p, n)
        a = rms_norm(xp, x, p["attn_norm"]["scale"], cfg.norm_eps)
        x = x + attention(xp, cfg, p["attn"], a)
        m = rms_norm(xp, x, p["mlp_norm"]["scale"], cfg.norm_eps)
        x = x + mlp(xp, p["mlp"], m)
    return rms_norm(xp, x, params["norm"]["scale"], cfg.norm_eps)


def _layer(tree, n):
    if isinstance(tree, dict):
        return {k: _layer(v, n) for k, v in tree.items()}
    return tree[n]


def logits(xp, cfg, params, tokens):
    kernel = (
        params["lm_head"]["kernel"]
        if "lm_head" in params
        else params["embed"]["embedding"].T
    )
    return hidden(xp, cfg, params, tokens) @ kernel


def log_softmax(xp, x):
    x = x - x.max(-1, keepdims=True)
    return x - xp.log(xp.exp(x).sum(-1, keepdims=True))


def scalars(xp, cfg, params, tokens):
    """Scalar head at every position [t]."""
    h = hidden(xp, cfg, params, tokens)
    return (h @ params["head"]["kernel"] + params["head"]["bias"])[:, 0]


def float64(tree):
    """A tree as numpy float64."""
    if isinstance(tree, dict):
        return {k: float64(v) for k, v in tree.items()}
    return np.asarray(tree, np.float64)
