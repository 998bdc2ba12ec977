"""Adapters as PEFT directories: there and back, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hf_dirs import random_params
from safetensors.numpy import load_file, save_file

from jppo.models import lora
from jppo.models import transformer as tf
from jppo.models.peft import load_adapter, save_adapter

CFG = dataclasses.replace(tiny.CFG, lora_scale=1.5)
TRAITS = {
    "gpt2": dict(norm="layer", positions="learned", gated=False, qkv_bias=True,
                 o_bias=True, mlp_bias=True, n_kv_heads=4),
    "gpt_neox": dict(norm="layer", gated=False, mlp_bias=True, parallel=True,
                     n_kv_heads=4),
    "phi3": {},
}  # fmt: skip


def random_adapter(params, rank=2, **how):
    fresh = lora.init_adapter(params, jax.random.key(0), rank=rank, **how)
    rng = np.random.default_rng(0)
    normal = lambda a: jnp.asarray(0.3 * rng.normal(size=a.shape), jnp.float32)  # noqa: E731
    return jax.tree.map(normal, fresh)


def test_there_and_back_is_bit_equal(tmp_path):
    adapter = random_adapter(tiny.params(CFG), targets="attn/[qo]|down")
    save_adapter(tmp_path / "a", CFG, adapter, base="some/model")
    back = load_adapter(tmp_path / "a", CFG)
    assert (back.scale, back.base) == (1.5, "some/model")
    assert jax.tree.structure(back.params) == jax.tree.structure(adapter)
    assert tiny.distance(back.params, adapter) == 0


def test_names_and_shapes_by_hand(tmp_path):
    adapter = random_adapter(tiny.params(CFG), targets="attn/o")
    save_adapter(tmp_path / "a", CFG, adapter, base="m")
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    a = tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"]
    factor = adapter["blocks"]["attn"]["o"]["lora_a"]
    np.testing.assert_array_equal(a[1, 2 * 4 + 3], factor[1, 2, 3, 1])
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3.0)
    assert config["target_modules"] == ["self_attn.o_proj"]
    assert config["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("family", TRAITS)
@pytest.mark.parametrize("targets", ["attn/", "attn/v|mlp/up"])
def test_fused_modules_say_the_same(tmp_path, family, targets):
    cfg = dataclasses.replace(CFG, family=family, **TRAITS[family])
    params = random_params(cfg)
    adapter = random_adapter(params, targets=targets)
    save_adapter(tmp_path / "a", cfg, adapter, base="m")
    back = load_adapter(tmp_path / "a", cfg)
    tokens, mask = jnp.arange(10).reshape(2, 5), jnp.ones((2, 5), bool)

    def run(factors):
        params_ = jax.tree.map(lambda a: 0.3 * a, params)
        whole = lora.overlay(params_, factors)
        return jax.jit(tf.logits, static_argnums=0)(cfg, whole, tokens, mask)

    np.testing.assert_allclose(run(back.params), run(adapter), atol=1e-5)
    assert tiny.distance(run(adapter), run({})) > 0.01


def test_a_head_and_the_top_layers(tmp_path):
    _, rest = tf.split_params(tiny.params(CFG, head=True), 1)
    adapter = random_adapter(rest) | {"head": rest["head"]}
    with pytest.raises(ValueError, match="head has a bias"):
        save_adapter(tmp_path / "a", CFG, adapter, base="m")
    adapter["head"]["bias"] = jnp.zeros(1)
    save_adapter(tmp_path / "a", CFG, adapter, base="m")
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert config["layers_to_transform"] == [1] and config["task_type"] == "SEQ_CLS"
    back = load_adapter(tmp_path / "a", CFG).params
    up = back["blocks"]["mlp"]["up"]["lora_b"]
    assert np.all(up[0] == 0)
    np.testing.assert_array_equal(up[1], adapter["blocks"]["mlp"]["up"]["lora_b"][0])
    np.testing.assert_array_equal(back["head"]["kernel"], adapter["head"]["kernel"])


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_other_ranks_and_scales(tmp_path):
    """PEFT's patterns are folded into B, so that one α/r serves the whole tree."""
    adapter = random_adapter(tiny.params(CFG), rank=4)
    save_adapter(tmp_path / "a", CFG, adapter, base="m")
    edit(tmp_path / "a", alpha_pattern={"up_proj": 3.0}, use_rslora=True)
    back = load_adapter(tmp_path / "a", CFG)
    assert back.scale == pytest.approx(6.0 / 2)
    got, want = (x["blocks"]["mlp"] for x in (back.params, adapter))
    np.testing.assert_allclose(got["up"]["lora_b"], want["up"]["lora_b"] / 2, rtol=1e-6)
    np.testing.assert_array_equal(got["down"]["lora_b"], want["down"]["lora_b"])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not 'LORA'"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
    ],
)
def test_refused_features_are_named(tmp_path, change, words):
    save_adapter(tmp_path / "a", CFG, random_adapter(tiny.params(CFG)), base="m")
    edit(tmp_path / "a", **change)
    with pytest.raises(ValueError, match=words):
        load_adapter(tmp_path / "a", CFG)


def test_bad_files_and_trees(tmp_path):
    params = tiny.params(CFG)
    adapter = random_adapter(params)
    with pytest.raises(ValueError, match="embedding is no part of an adapter"):
        save_adapter(tmp_path / "a", CFG, params, base="m")
    with pytest.raises(FileNotFoundError, match="is this an adapter directory"):
        load_adapter(tmp_path, CFG)
    save_adapter(tmp_path / "a", CFG, adapter, base="m")
    with pytest.raises(FileExistsError):
        save_adapter(tmp_path / "a", CFG, adapter, base="m")
    file = tmp_path / "a/adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.extra": np.ones(1, np.float32)}, file)
    with pytest.raises(ValueError, match="1 unexpected tensor.*model.extra"):
        load_adapter(tmp_path / "a", CFG)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file(tensors | {name: np.ones((2, 5), np.float32)}, file)
    with pytest.raises(ValueError, match=r"layers.0.mlp.up_proj.*\(2, 5\)"):
        load_adapter(tmp_path / "a", CFG)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="pickle"):
        load_adapter(tmp_path / "a", CFG)
