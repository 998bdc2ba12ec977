"""From logits to tokens: pure transforms, and a sampler with one key a row.

The transforms set the logits of excluded tokens to −inf and apply in one order:
temperature → top-k → top-p → min-p. `sample` inverts the cumulative distribution:
two uniform numbers a row, instead of Gumbel noise for every entry of the vocabulary.
A row's token depends on its own key and logits alone.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jppo.masked import Scalar

BLOCK = 256  # tokens a block: about √vocab, so both cumulative sums are short
FLOOR = -80.0  # exp(−80) is a normal float32; smaller ones may be flushed to 0 or not


def with_temperature(
    logits: Float[Array, "*b v"], *, temperature: Scalar
) -> Float[Array, "*b v"]:
    """Logits divided by T, float32; T=1 changes nothing.

    Raises ValueError when T is a Python number and not positive (use `greedy`).
    """
    if isinstance(temperature, (float, int)) and temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}; see greedy")
    return logits.astype(jnp.float32) / temperature


def top_k(logits: Float[Array, "*b v"], *, k: int) -> Float[Array, "*b v"]:
    """Keep the k largest logits, the rest −inf.

    Tokens that tie with the k-th are all kept. k=0 and k ≥ v change nothing.
    Raises ValueError when k < 0.
    """
    if k < 0:
        raise ValueError(f"top_k must not be negative; got {k}")
    if k == 0 or k >= logits.shape[-1]:
        return logits
    kth = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits >= kth, logits, -jnp.inf)


def top_p(logits: Float[Array, "*b v"], *, p: Scalar) -> Float[Array, "*b v"]:
    """Nucleus: keep the fewest likeliest tokens whose probability reaches p.

    A token stays while the probability of those ahead of it is < p, so the likeliest
    always stays; ties with the last kept token stay too. p ≥ 1 changes nothing
    (1904.09751).
    """
    if isinstance(p, (float, int)) and p >= 1:
        return logits
    ordered = jnp.sort(logits.astype(jnp.float32), axis=-1, descending=True)
    probs = jax.nn.softmax(ordered, axis=-1)
    ahead = jnp.cumsum(probs, axis=-1) - probs
    kept = (ahead < p) | (jnp.arange(logits.shape[-1]) == 0)
    last = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where((logits >= last) | (p >= 1), logits, -jnp.inf)


def min_p(logits: Float[Array, "*b v"], *, p: Scalar) -> Float[Array, "*b v"]:
    """Keep tokens at least p times as likely as the likeliest, the rest −inf.

    The likeliest always stays; p ≤ 0 changes nothing (2407.01082).
    """
    if isinstance(p, (float, int)) and p <= 0:
        return logits
    best = jnp.max(logits, axis=-1, keepdims=True)
    floor = best + jnp.minimum(jnp.log(jnp.asarray(p, jnp.float32)), 0.0)
    return jnp.where((logits >= floor) | (p <= 0), logits, -jnp.inf)


def restrict(
    logits: Float[Array, "*b v"],
    *,
    temperature: Scalar = 1.0,
    top_k: int = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
) -> Float[Array, "*b v"]:
    """The distribution that is sampled: temperature → top-k → top-p → min-p.

    Float32 logits, −inf where excluded; never all of a row. Raises as its parts do.
    """
    logits = with_temperature(logits, temperature=temperature)
    return _min_p(_top_p(_top_k(logits, k=top_k), p=top_p), p=min_p)


_top_k, _top_p, _min_p = top_k, top_p, min_p  # `restrict` has arguments of those names


def _choose(weights: Float[Array, "*b n"], u: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """First index whose cumulative weight exceeds u · total, among weights > 0."""
    cdf = jnp.cumsum(weights, axis=-1)
    possible = weights > 0
    # The last possible index closes the interval: rounding cannot leave it empty.
    n = weights.shape[-1]
    last = n - 1 - jnp.argmax(possible[..., ::-1], axis=-1)
    hit = (cdf > u[..., None] * cdf[..., -1:]) & possible
    return jnp.where(hit.any(axis=-1), jnp.argmax(hit, axis=-1), last)


def _weights(z: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    return jnp.where(z > FLOOR, jnp.exp(z), 0.0)


def sample(
    keys: Key[Array, "*b"],
    logits: Float[Array, "*b v"],
    *,
    temperature: Scalar = 1.0,
    top_k: int = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
) -> Int[Array, "*b"]:
    """One token a row, drawn from softmax(restrict(logits)), int32.

    keys [*b] are new-style (`jax.random.key`), one a row. The token is drawn in two
    steps, P(block) · P(token | block) for blocks of 256 tokens, each by inversion of
    a short float32 sum; a single sum over 50 000 terms would misplace rare tokens.
    A token of probability 0 (below e^−80 of the likeliest) is never drawn.
    Raises AssertionError unless there is one key a row.
    """
    chex.assert_shape(keys, logits.shape[:-1])
    logits = restrict(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys.reshape(-1))
    u = u.reshape(*keys.shape, 2)

    width = min(BLOCK, logits.shape[-1])
    best = jnp.max(logits, axis=-1, keepdims=True)
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, -logits.shape[-1] % width)]
    padded = jnp.pad(logits, pad, constant_values=-jnp.inf)
    blocks = padded.reshape(*keys.shape, -1, width)

    sums = jnp.sum(_weights(blocks - best[..., None]), axis=-1)
    block = _choose(sums, u[..., 0])
    # Logits are gathered and weighed again: gathering weights would store them all.
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    token = block * width + _choose(_weights(inside - best), u[..., 1])
    return token.astype(jnp.int32)


def greedy(logits: Float[Array, "*b v"]) -> Int[Array, "*b"]:
    """The likeliest token of each row, int32; the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
