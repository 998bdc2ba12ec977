"""Log-probs: goldens, dtypes, and the chunked head against the whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.logprobs import chunked_logprobs, entropy, head_logits, token_logprobs

jitted = pytest.mark.parametrize("wrap", [jax.jit], ids=["jit"])


def normal(seed, *shape):
    # numpy: every new shape of jax.random would compile for a second
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def integers(seed, high, *shape):
    x = np.random.default_rng(seed).integers(0, high, shape)
    return jnp.asarray(x, jnp.int32)


def close(actual, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tol, atol=tol)


def log_softmax64(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@jitted
@pytest.mark.parametrize(
    "temperature, expected",
    [
        (1.0, [-0.40760596, -1.40760596, -2.40760596]),
        (0.7, [-0.2601184, -1.68868983, -3.11726126]),
    ],
)
def test_temperature(wrap, temperature, expected):
    """temperature: logits [2,1,0]."""
    logits = jnp.tile(jnp.array([2.0, 1.0, 0.0]), (3, 1))
    f = wrap(lambda x, i: token_logprobs(x, i, temperature=temperature))
    close(f(logits, jnp.arange(3)), expected)
    traced = jax.jit(lambda t: token_logprobs(logits, jnp.arange(3), temperature=t))
    close(traced(jnp.float32(temperature)), expected)


def test_gradient_is_onehot_minus_softmax():
    x = jnp.array([[2.0, 1.0, 0.0]])
    p = np.exp(log_softmax64(x))
    grad = jax.grad(lambda x: token_logprobs(x, jnp.array([1]), temperature=0.5)[0])(x)
    p = np.exp(log_softmax64(2 * np.asarray(x)))
    close(grad, (np.array([[0.0, 1.0, 0.0]]) - p) / 0.5)


def test_bfloat16_logits_are_cast_before_the_softmax():
    x = normal(0, 2, 5, 100).astype(jnp.bfloat16) * 4
    tokens = integers(1, 100, 2, 5)
    logp = token_logprobs(x, tokens)
    exact = np.take_along_axis(
        log_softmax64(x.astype(jnp.float32)), np.asarray(tokens)[..., None], -1
    )
    assert logp.dtype == entropy(x).dtype == jnp.float32
    close(logp, exact[..., 0], 5e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 3e38])
def test_never_positive(scale):
    x = jnp.sign(normal(0, 50, 7)) * scale
    logp = token_logprobs(x, jnp.argmax(x, -1))
    assert jnp.all(logp <= 0) and jnp.isfinite(logp).all()


@jitted
def test_entropy(wrap):
    x = jnp.array([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, -1.0]])
    logp = log_softmax64(x)
    close(wrap(entropy)(x), -(np.exp(logp) * logp).sum(-1))
    close(entropy(x)[0], np.log(4.0))
    logp = log_softmax64(np.asarray(x) / 0.5)
    close(entropy(x, temperature=0.5), -(np.exp(logp) * logp).sum(-1))


def test_entropy_gradient():
    """∇H = −p (log p + H), which is 0 for the uniform distribution."""
    x = jnp.array([1.0, 2.0, 0.0, -1.0])
    logp = log_softmax64(x)
    h = -(np.exp(logp) * logp).sum()
    close(jax.grad(entropy)(x), -np.exp(logp) * (logp + h))
    close(jax.grad(entropy)(jnp.zeros(4)), np.zeros(4))


def test_entropy_with_impossible_tokens():
    x = jnp.array([0.0, 0.0, -jnp.inf])
    value, grad = jax.value_and_grad(entropy)(x)
    close(value, np.log(2.0))
    assert jnp.isfinite(grad).all()


B, T, D, V = 3, 5, 4, 11


def inputs(dtype=jnp.float32):
    hidden = normal(0, B, T, D).astype(dtype)
    kernel = normal(1, D, V)
    return hidden, kernel, integers(2, V, B, T)


def exact(hidden, kernel, tokens, temperature):
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
    logp = log_softmax64(logits / temperature)
    picked = np.take_along_axis(logp, np.asarray(tokens)[..., None], -1)[..., 0]
    return picked, -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk", [1, 6, 9, 12, 15, 100])
def test_chunked_equals_whole(chunk, transposed):
    """1, 2, 3, 4 or all 5 positions a chunk, with and without padding of t."""
    hidden, kernel, tokens = inputs()
    logp, ent = chunked_logprobs(
        hidden,
        kernel.T if transposed else kernel,
        tokens,
        temperature=0.7,
        chunk=chunk,
        transposed=transposed,
    )
    expected = exact(hidden, kernel, tokens, 0.7)
    close(logp, expected[0], 5e-6)
    close(ent, expected[1], 5e-6)
    assert logp.dtype == ent.dtype == jnp.float32


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("chunk", [6, 100])
def test_chunked_gradients(chunk, remat):
    hidden, kernel, tokens = inputs()
    weights = normal(5, 2, B, T)

    def chunked(hidden, kernel):
        logp, ent = chunked_logprobs(
            hidden, kernel.T, tokens, chunk=chunk, transposed=True, remat=remat
        )
        return jnp.sum(weights[0] * logp + weights[1] * ent)

    def whole(hidden, kernel):
        logits = jnp.einsum("btd,dv->btv", hidden, kernel)
        logp = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]
        ent = -jnp.sum(jnp.exp(logp) * logp, -1)
        return jnp.sum(weights[0] * picked + weights[1] * ent)

    actual = jax.jit(jax.grad(chunked, (0, 1)))(hidden, kernel)
    for a, e in zip(actual, jax.grad(whole, (0, 1))(hidden, kernel), strict=True):
        close(a, e, 2e-5)


def test_chunked_without_entropy():
    hidden, kernel, tokens = inputs()
    for chunk in (6, 100):
        logp, ent = chunked_logprobs(hidden, kernel, tokens, chunk=chunk, entropy=False)
        assert ent is None
        close(logp, exact(hidden, kernel, tokens, 1.0)[0], 5e-6)
    with pytest.raises(ValueError, match="at least 1"):
        chunked_logprobs(hidden, kernel, tokens, chunk=0)


def test_chunked_in_bfloat16_accumulates_in_float32():
    hidden, kernel, tokens = inputs(jnp.bfloat16)
    rounded = kernel.astype(jnp.bfloat16)
    logp, _ = chunked_logprobs(hidden, kernel, tokens, chunk=6)
    close(logp, exact(hidden, rounded, tokens, 1.0)[0], 5e-6)
    f = lambda h, k: chunked_logprobs(h, k, tokens, chunk=6)[0].sum()  # noqa: E731
    grad_h, grad_k = jax.grad(f, (0, 1))(hidden, kernel)
    assert grad_h.dtype == jnp.bfloat16 and grad_k.dtype == jnp.float32


def shapes(jaxpr):
    """Shapes of all intermediates, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for p in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(p, "jaxpr", p)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def test_no_logits_of_the_whole_batch_exist():
    """With its gradient, nothing is as large as [b, t, v]; unchunked, it is."""
    b, t, d, v = 2, 32, 4, 64
    hidden, kernel = jnp.zeros((b, t, d)), jnp.zeros((v, d))
    tokens = jnp.zeros((b, t), int)

    def largest(chunk):
        f = lambda h, k: chunked_logprobs(  # noqa: E731
            h, k, tokens, chunk=chunk, transposed=True
        )[0].sum()
        jaxpr = jax.make_jaxpr(jax.grad(f, (0, 1)))(hidden, kernel)
        return max(np.prod(s, dtype=int) for s in shapes(jaxpr.jaxpr))

    assert largest(8) <= 8 * v
    assert largest(1000) == b * t * v


def test_head_logits():
    hidden, kernel, _ = inputs()
    expected = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
    close(head_logits(hidden, kernel), expected, 5e-6)
    close(head_logits(hidden, kernel.T, transposed=True), expected, 5e-6)
    assert head_logits(hidden.astype(jnp.bfloat16), kernel).dtype == jnp.float32


def test_wrong_shapes_are_refused():
    hidden, kernel, tokens = inputs()
    with pytest.raises((AssertionError, TypeError)):
        token_logprobs(hidden, tokens[:, :2])
    with pytest.raises((AssertionError, TypeError)):
        chunked_logprobs(hidden, kernel.T, tokens)
    with pytest.raises((AssertionError, TypeError)):
        chunked_logprobs(hidden, kernel, tokens[:2])
