"""Adapters: the base where B is 0, and elsewhere what the merged weights say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jppo.models import lora
from jppo.models import transformer as tf
from jppo.models.hf import load_hf, save_hf

CFG = dataclasses.replace(tiny.CFG, lora_scale=1.5)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 7)), jnp.int32)
MASK = jnp.ones((2, 7), bool).at[1, :3].set(False)


def adapter(params, *, rank=2, seed=1, spread=0.3, **how):
    """An adapter whose B is not 0."""
    fresh = lora.init_adapter(params, jax.random.key(seed), rank=rank, **how)
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda a: a + jnp.asarray(rng.normal(size=a.shape) * spread, jnp.float32), fresh
    )


def logits(params):
    return jax.jit(tf.logits, static_argnums=0)(CFG, params, TOKENS, MASK)


def test_a_fresh_adapter_changes_nothing():
    params = tiny.params(CFG)
    fresh = lora.init_adapter(params, jax.random.key(0), rank=3)
    b = [leaf for path, leaf in lora.flatten(fresh).items() if path.endswith("lora_b")]
    a = [leaf for path, leaf in lora.flatten(fresh).items() if path.endswith("lora_a")]
    assert len(a) == len(b) == 7
    assert all(np.all(x == 0) for x in b)
    assert all(0.02 < np.abs(x).max() <= 0.5 for x in a)
    got = logits(lora.overlay(params, fresh))
    np.testing.assert_array_equal(got, logits(params))


def test_merged_weights_say_the_same():
    params = tiny.params(CFG)
    whole = lora.overlay(params, adapter(params))
    assert tiny.distance(logits(whole), logits(params)) > 0.1
    merged = lora.merge_adapter(whole, CFG.lora_scale)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    np.testing.assert_allclose(logits(merged), logits(whole), atol=2e-5)


def test_one_projection_by_hand():
    """o has two input axes: its factors are contracted over both."""
    params = tiny.params(CFG)
    whole = lora.overlay(params, adapter(params, targets="attn/o"))
    o = whole["blocks"]["attn"]["o"]
    low = np.einsum("nher,nrd->nhed", o["lora_a"], o["lora_b"])
    merged = lora.merge_adapter(whole, 1.5)["blocks"]["attn"]["o"]["kernel"]
    np.testing.assert_allclose(merged, o["kernel"] + 1.5 * low, atol=1e-6)


@pytest.mark.parametrize(
    "targets, count", [("attn/[qv]$", 2), ("mlp/", 3), ("", 7), ("attn/o|mlp/down", 2)]
)
def test_targets_choose_projections(targets, count):
    fresh = lora.init_adapter(
        tiny.params(CFG), jax.random.key(0), rank=2, targets=targets
    )
    assert len(lora.flatten(fresh)) == 2 * count


def test_bad_rank_and_targets():
    params = tiny.params(CFG)
    with pytest.raises(ValueError, match="lora rank must be at least 1, got 0"):
        lora.init_adapter(params, jax.random.key(0), rank=0)
    with pytest.raises(ValueError, match="targets 'query' match none of.*attn/q"):
        lora.init_adapter(params, jax.random.key(0), rank=1, targets="query")


def test_split_is_the_inverse_of_overlay():
    params = tiny.params(CFG)
    factors = adapter(params)
    base, back = lora.split_adapter(lora.overlay(params, factors))
    for got, want in ((base, params), (back, factors)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert tiny.distance(got, want) == 0


def test_an_adapter_on_the_top_of_a_trunk():
    """Merging with a trunk that has none leaves the trunk as it is."""
    params = tiny.params(CFG)
    trunk, rest = tf.split_params(params, 1)
    over = lora.overlay(rest, adapter(rest))
    whole = tf.merge_params(trunk, over)
    middle = tf.hidden_states(CFG, trunk, TOKENS, MASK)
    np.testing.assert_allclose(
        tf.hidden_states(CFG, over, middle, MASK),
        tf.hidden_states(CFG, whole, TOKENS, MASK),
        atol=1e-6,
    )
    first = whole["blocks"]["mlp"]["up"]["lora_b"]
    assert np.all(first[0] == 0) and np.any(first[1])


def test_gradients_reach_the_factors_alone():
    params = tiny.params(CFG)
    factors = adapter(params)

    def loss(factors, x):
        return tf.logits(CFG, lora.overlay(params, factors), x, MASK).std()

    grads = jax.grad(loss)(factors, TOKENS)
    assert jax.tree.structure(grads) == jax.tree.structure(factors)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_saved_models_have_their_adapters_merged(tmp_path):
    params = tiny.params(CFG)
    whole = lora.overlay(params, adapter(params))
    save_hf(tmp_path / "m", CFG, whole)
    cfg, back = load_hf(tmp_path / "m")
    assert cfg == dataclasses.replace(CFG, lora_scale=1.0, family="llama")
    np.testing.assert_allclose(
        jax.jit(tf.logits, static_argnums=0)(cfg, back, TOKENS, MASK),
        logits(whole),
        atol=2e-5,
    )
