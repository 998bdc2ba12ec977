"""Log-probs and entropies of tokens, without ever holding [b, t, vocab] in float32.

Logits become float32 *before* the softmax: a bfloat16 log-prob moves in steps of
.03, which PPO would read as a ratio. The same temperature must divide the logits
wherever log-probs are compared (sampler, old, new, reference). `chunked_logprobs`
applies the LM head to a few token positions at a time, and recomputes them in the
backward pass.
"""

import math

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jppo.masked import Scalar


def _log_softmax_parts(
    logits: Float[Array, "*n v"], temperature: Scalar
) -> tuple[Float[Array, "*n v"], Float[Array, "*n"]]:
    """z = x/T − max and log Σ exp z ≥ 0, so that log p = z − log Σ exp z ≤ 0."""
    logits = logits.astype(jnp.float32) / temperature
    z = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return z, jnp.log(jnp.sum(jnp.exp(z), axis=-1))


def _entropy_parts(z: Float[Array, "*n v"], lse: Float[Array, "*n"]):
    # A token of probability 0 (logit −inf) adds 0, not 0·∞.
    finite = z > -jnp.inf
    p = jnp.exp(z - lse[..., None])
    return lse - jnp.sum(p * jnp.where(finite, z, 0.0), axis=-1)


def _pick(z: Float[Array, "*n v"], tokens: Int[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.take_along_axis(z, tokens[..., None], axis=-1)[..., 0]


def token_logprobs(
    logits: Float[Array, "*b t v"],
    tokens: Int[Array, "*b t"],
    *,
    temperature: Scalar = 1.0,
) -> Float[Array, "*b t"]:
    """Log-prob of each token, log softmax(logits / T)[token], in nats, never > 0.

    Logits at position t predict tokens at position t here: shift before the call.
    Float32 whatever the dtype of the logits.
    Raises AssertionError unless tokens have the logits' shape without the last axis.
    """
    chex.assert_shape(tokens, logits.shape[:-1])
    z, lse = _log_softmax_parts(logits, temperature)
    return _pick(z, tokens) - lse


def entropy(
    logits: Float[Array, "*b v"], *, temperature: Scalar = 1.0
) -> Float[Array, "*b"]:
    """Entropy −Σ_v p(v) log p(v) of softmax(logits / T), in nats, float32.

    A logit of −inf adds 0.
    """
    z, lse = _log_softmax_parts(logits, temperature)
    return _entropy_parts(z, lse)


def head_logits(
    hidden: Float[Array, "*b d"],
    kernel: Float[Array, "_d _v"],
    *,
    transposed: bool = False,
    softcap: float | None = None,
) -> Float[Array, "*b v"]:
    """Logits of the LM head in float32: hidden · kernel, or hidden · kernelᵀ.

    kernel is [d v], or [v d] with transposed=True (tied embedding; no transposed
    copy is made). The product runs in hidden's dtype and accumulates in float32.
    softcap c bounds logits softly, c · tanh(logits / c) (Gemma 2, 2408.00118).
    Raises AssertionError when d differs.
    """
    axis = 1 if transposed else 0
    chex.assert_axis_dimension(kernel, axis, hidden.shape[-1])
    logits = jax.lax.dot_general(
        hidden,
        kernel.astype(hidden.dtype),
        (((hidden.ndim - 1,), (axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def chunked_logprobs(
    hidden: Float[Array, "b t d"],
    kernel: Float[Array, "_d _v"],
    tokens: Int[Array, "b t"],
    *,
    temperature: Scalar = 1.0,
    chunk: int = 4096,
    transposed: bool = False,
    softcap: float | None = None,
    entropy: bool = True,
    remat: bool = True,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"] | None]:
    """(log-probs, entropies) of tokens from hidden states, head applied in chunks.

    token_logprobs(head_logits(hidden, kernel), tokens), with logits for about
    `chunk` tokens in memory at a time. Chunks cut t and keep b whole, so that rows
    stay on their devices; one chunk has at least one position of every row. When
    all tokens fit into one chunk there is no loop. remat=True recomputes the logits
    in the backward pass: one more head product, nothing vocabulary-sized kept.
    Entropies are None with entropy=False. kernel and softcap as in `head_logits`.
    Raises ValueError when chunk < 1, AssertionError when shapes differ.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token; got {chunk}")
    chex.assert_rank([hidden, kernel, tokens], [3, 2, 2])
    chex.assert_shape(tokens, hidden.shape[:-1])
    b, t, d = hidden.shape
    kernel = kernel.astype(hidden.dtype)  # once, not once a chunk

    def score(hidden, tokens, kernel):
        logits = head_logits(hidden, kernel, transposed=transposed, softcap=softcap)
        z, lse = _log_softmax_parts(logits, temperature)
        logp = _pick(z, tokens) - lse
        return logp, _entropy_parts(z, lse) if entropy else None

    if remat:
        score = jax.checkpoint(score)
    if b * t <= chunk:
        return score(hidden, tokens, kernel)

    # Equal parts: n chunks of `size` positions, so that little of the last is padding.
    n = math.ceil(t / max(1, chunk // b))
    size = math.ceil(t / n)
    n = math.ceil(t / size)
    pad = ((0, 0), (0, n * size - t))
    hidden = jnp.pad(hidden, (*pad, (0, 0))).reshape(b, n, size, d)
    tokens = jnp.pad(tokens, pad).reshape(b, n, size)
    xs = (jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(tokens, 1, 0))
    _, out = jax.lax.scan(lambda _, x: (None, score(*x, kernel)), None, xs)
    return jax.tree.map(
        lambda y: jnp.moveaxis(y, 0, 1).reshape(b, n * size)[:, :t], out
    )
