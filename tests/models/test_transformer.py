"""The decoder: causal, blind to padding, and equal to a naive second implementation."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
import tiny

from jppo.models import transformer as tf
from jppo.models.layers import rotate, view

CFG, TIED = tiny.CFG, tiny.TIED
SEQ = 7


@pytest.fixture(scope="module")
def params():
    return tiny.params(CFG)


@pytest.fixture(scope="module")
def forward():
    """Logits [b, t, v]; one compilation a config and shape."""
    return jax.jit(tf.logits, static_argnums=0)


@pytest.fixture(scope="module")
def run():
    return jax.jit(partial(tf.hidden_states, CFG))


def tokens(b=2, t=SEQ, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, CFG.vocab_size, (b, t)), jnp.int32)


def full(x):
    return jnp.ones(x.shape, bool)


@pytest.mark.parametrize("cfg", [CFG, TIED], ids=["untied", "tied"])
def test_equals_the_naive_decoder(cfg, forward):
    """Grouped heads, RoPE pairing, scaling, norms, SwiGLU and the head, in float64."""
    params, x = tiny.params(cfg), tokens()
    out = forward(cfg, params, x, full(x))
    for row, got in zip(np.asarray(x), out, strict=True):
        expected = plain.logits(np, cfg, plain.float64(params), row)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert out.dtype == jnp.float32


def test_tied_and_untied_differ(forward):
    x = tokens()
    assert (
        tiny.distance(
            forward(CFG, tiny.params(CFG), x, full(x)),
            forward(TIED, tiny.params(TIED), x, full(x)),
        )
        > 0.1
    )


def test_causality_by_gradient(params):
    """∂ hidden[t] / ∂ input[u] is exactly 0 for u > t, and not 0 for u ≤ t."""
    upper = {"blocks": params["blocks"], "norm": params["norm"]}
    x = jax.random.normal(jax.random.key(0), (1, SEQ, CFG.d_model))

    def influence(x, weights):
        h = tf.hidden_states(CFG, upper, x, jnp.ones((1, SEQ), bool))
        return (h * weights[None, :, None]).sum()

    rows = jax.jit(jax.vmap(jax.grad(influence), (None, 0)))(x, jnp.eye(SEQ))
    reached = np.abs(rows[:, 0]).max(-1) > 0  # [t, u]
    np.testing.assert_array_equal(reached, np.tri(SEQ, dtype=bool))


@pytest.mark.parametrize("left, right", [(1, 0), (17, 0), (0, 1), (0, 17), (3, 14)])
def test_padding_changes_nothing(params, forward, left, right):
    """Any number of pads of any content, on either side."""
    x = tokens()
    pads = 17
    expected = forward(CFG, params, x, full(x))
    # One static width: what is no padding here is padding of the other kind.
    left, right = (left, pads - left) if not right else (pads - right, right)
    wide = jnp.pad(x, ((0, 0), (left, right)), constant_values=9)
    mask = jnp.pad(full(x), ((0, 0), (left, right)))
    out = forward(CFG, params, wide, mask)[:, left : left + SEQ]
    tiny.close(out, expected)
    other = forward(CFG, params, jnp.where(mask, wide, 5), mask)
    np.testing.assert_array_equal(other[:, left : left + SEQ], out)


def test_mixed_padding_in_one_batch(params, forward):
    """Rows of 7 and 4 tokens, left-padded together, are as they are alone."""
    x = tokens()
    mask = jnp.arange(SEQ)[None] >= jnp.array([[0], [3]])
    out = forward(CFG, params, x, mask)
    expected = plain.logits(np, CFG, plain.float64(params), np.asarray(x)[1, 3:])
    np.testing.assert_allclose(out[1, 3:], expected, rtol=1e-5, atol=1e-5)


def test_fully_masked_row_is_finite_with_a_finite_gradient(params):
    x = tokens()
    mask = full(x).at[1].set(False)

    def total(p):
        return jnp.square(tf.hidden_states(CFG, p, x, mask)).sum()

    value, grads = jax.jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("cut", [None, 0, 1, 2])
@pytest.mark.parametrize("cfg", [CFG, TIED], ids=["untied", "tied"])
def test_split_and_merge_are_inverse(cfg, cut):
    """None freezes nothing; 0 the embedding alone; 2 all but the norm and the head."""
    params = tiny.params(cfg)
    trunk, rest = tf.split_params(params, cut)
    assert ("embed" in rest) == (cut is None) != ("embed" in trunk)
    assert tf.depth(trunk) == (cut or 0)
    assert tf.depth(trunk) + tf.depth(rest) == 2
    back = tf.merge_params(trunk, rest)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert tiny.distance(back, params) == 0.0


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_trunk_then_rest_is_the_whole_bitwise(params, run, cut):
    x = tokens()
    mask = full(x).at[1, :3].set(False)
    trunk, rest = tf.split_params(params, cut)
    middle = run(trunk, x, mask)
    whole = run(params, x, mask)
    np.testing.assert_array_equal(run(rest, middle, mask), whole)
    assert tiny.distance(middle, whole) > 0.1  # not normalised


@pytest.mark.parametrize("cut", [-1, 3])
def test_cut_lies_inside_the_model(params, cut):
    with pytest.raises(ValueError, match=f"cannot cut {cut} layers off a model of 2"):
        tf.split_params(params, cut)


def test_rope_is_relative():
    """q·k depends on the distance of the positions and on nothing else."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 3, 2, 4)), jnp.float32) for _ in "qk")
    at = jnp.array([[0, 2, 7]])

    def products(shift_q, shift_k):
        seen = jnp.ones((1, 3, 3), bool)
        far = jnp.zeros((3, 3), jnp.int32)
        turned = rotate(q, view(CFG, "full", at + shift_q, seen, far))
        other = rotate(k, view(CFG, "full", at + shift_k, seen, far))
        return jnp.einsum("bthe,bshe->bhts", turned, other)

    tiny.close(products(11, 11), products(0, 0))
    assert tiny.distance(products(1, 0), products(0, 0)) > 0.1
    tiny.close(products(0, 0)[..., 0, 0], jnp.einsum("bhe,bhe->bh", q[:, 0], k[:, 0]))


def test_positions_skip_padding():
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    got = tf.positions_of(mask)
    np.testing.assert_array_equal(got[0], [0, 0, 0, 1, 2])
    np.testing.assert_array_equal(got[1, :3], [0, 1, 2])
    np.testing.assert_array_equal(got[2], 0)


def test_remat_and_unroll_change_no_number(params):
    x = tokens()

    def loss(p, cfg):
        return jnp.square(tf.hidden_states(cfg, p, x, full(x))).sum()

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    one_by_one = dataclasses.replace(CFG, remat=True, unroll=1)
    tiny.close(run(params, one_by_one), run(params, CFG))


@pytest.mark.parametrize(
    ("n_layers", "unroll", "loops"), [(4, None, 1), (5, None, 5), (4, 1, 4), (6, 3, 2)]
)
def test_a_shallow_stack_is_unrolled_and_a_deep_one_looped(n_layers, unroll, loops):
    cfg = dataclasses.replace(CFG, n_layers=n_layers, unroll=unroll)
    params, x = tiny.params(cfg), tokens()
    jaxpr = jax.make_jaxpr(partial(tf.hidden_states, cfg))(params, x, full(x))
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan.params["length"] == n_layers
    assert -(-n_layers // scan.params["unroll"]) == loops


def test_bfloat16_is_for_compute_only(params):
    """Hidden states are bfloat16; params, logits and scalars stay float32."""
    cfg, x = dataclasses.replace(CFG, dtype="bfloat16"), tokens()
    mask = full(x)
    head = tiny.params(cfg, head=True)
    hidden = jax.jit(partial(tf.hidden_states, cfg))(params, x, mask)
    out = jax.jit(partial(tf.logits, cfg))(params, x, mask)
    assert hidden.dtype == jnp.bfloat16
    assert out.dtype == tf.scalar_head(head, hidden).dtype == jnp.float32
    exact = plain.logits(np, CFG, plain.float64(params), np.asarray(x)[0])
    gap = np.abs(out[0] - exact).max()
    assert 1e-4 < gap < 0.1  # it really ran in bfloat16, and roughly right


def test_tree_and_input_must_fit(params):
    mask = jnp.ones((1, 3), bool)
    with pytest.raises(ValueError, match=r"takes token ids \[b, t\].*\(1, 3, 16\)"):
        tf.hidden_states(CFG, params, jnp.zeros((1, 3, 16)), mask)
    _, rest = tf.split_params(params, 1)
    with pytest.raises(ValueError, match="one without takes hidden states"):
        tf.hidden_states(CFG, rest, jnp.zeros((1, 3), jnp.int32), mask)
    with pytest.raises(ValueError, match="no LM head and no embedding"):
        tf.lm_kernel({"blocks": {}}, {})


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("cfg", [CFG, TIED], ids=["untied", "tied"])
def test_fresh_params_are_the_documented_tree(cfg, head):
    made = jax.eval_shape(
        lambda k: tf.init_params(cfg, k, scalar_head=head), jax.random.key(0)
    )
    like = tiny.params(cfg, head=head)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, like)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(made))


def test_fresh_weights():
    """N(0, .02) weights, unit norms, head N(0, 1/√(d+1)) with bias 0."""
    cfg = dataclasses.replace(CFG, d_model=64, vocab_size=97)
    make = jax.jit(lambda k: tf.init_params(cfg, k, scalar_head=True))
    made = make(jax.random.key(0))
    assert abs(np.std(made["embed"]["embedding"]) - 0.02) < 0.002
    assert abs(np.std(made["blocks"]["mlp"]["up"]["kernel"]) - 0.02) < 0.002
    assert (made["norm"]["scale"] == 1).all() and made["head"]["bias"] == 0
    assert 0.08 < np.std(made["head"]["kernel"]) < 0.17  # 1/√65 ≈ .124
    kernel = made["blocks"]["attn"]["q"]["kernel"]
    assert tiny.distance(kernel[0], kernel[1]) > 0.01  # layers are not copies
    assert tiny.distance(make(jax.random.key(1)), made) > 0.01
