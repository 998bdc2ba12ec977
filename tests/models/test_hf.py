"""Weights in and out: against torch's goldens, and bit for bit there and back."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hf_dirs import CFG, edit_tensors, random_params
from safetensors.numpy import load_file, save_file

from jppo.config import ModelConfig
from jppo.models import transformer
from jppo.models.hf import load_hf, save_hf
from jppo.sharding import make_mesh, tree_shardings

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


def assert_same(a: dict, b: dict) -> None:
    a, b = flatten_dict(a, sep="/"), flatten_dict(b, sep="/")
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype == jnp.float32, key
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def write_golden(folder: Path, name: str):
    """The golden's weights as the directory that transformers wrote."""
    golden = np.load(GOLDENS / f"llama_{name}.npz")
    weights = {
        key.removeprefix("weights/"): golden[key]
        for key in golden.files
        if key.startswith("weights/")
    }
    save_file(weights, folder / "model.safetensors")  # as float16
    (folder / "config.json").write_text(str(golden["config"]))
    return golden


# ── goldens made by torch ────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["mha_tied", "gqa_untied", "mqa_head"])
def test_logits_equal_torch(tmp_path, name):
    golden = write_golden(tmp_path, name)
    cfg, params = load_hf(tmp_path)
    assert ("lm_head" in params) == (name == "gqa_untied")
    run = jax.jit(transformer.logits, static_argnums=0)
    got = np.asarray(run(cfg, params, golden["tokens"], golden["mask"]))
    want, valid = golden["logits"], golden["mask"]
    assert want[valid].std() > 0.5  # far from the flat logits of a tiny init
    np.testing.assert_allclose(got[valid], want[valid], atol=3e-5)


def test_scores_equal_torch(tmp_path):
    golden = write_golden(tmp_path, "scorer")
    cfg, params = load_hf(tmp_path)
    assert "lm_head" not in params and params["head"]["bias"] == 0
    run = jax.jit(transformer.hidden_states, static_argnums=0)
    hidden = run(cfg, params, golden["tokens"], golden["mask"])
    got = transformer.scalar_head(params, hidden[:, -1])
    np.testing.assert_allclose(got, golden["logits"][:, 0], atol=3e-5)


def test_smollm2_equals_torch(smollm2_dir):
    golden = np.load(GOLDENS / "smollm2.npz")
    cfg, params = load_hf(smollm2_dir)
    rows = golden["rows"]
    mask = golden["mask"][rows]
    run = jax.jit(transformer.logits, static_argnums=0)
    got = np.asarray(run(cfg, params, golden["tokens"][rows], mask))
    np.testing.assert_allclose(got[:, -1, :64], golden["logits_last"], atol=2e-3)
    for x, m, want in zip(got, mask, golden["logits_first"], strict=True):
        first = x[m][:8, :64]
        np.testing.assert_allclose(first, want[: len(first)], atol=2e-3)
    lse = np.asarray(jax.nn.logsumexp(got, axis=-1))
    np.testing.assert_allclose(lse[mask], golden["logsumexp"][mask], atol=2e-3)
    np.testing.assert_array_equal(got.argmax(-1)[mask], golden["argmax"][mask])


# ── there and back ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [False, True])
def test_save_and_load_is_bit_equal(tmp_path, tied, head):
    cfg = ModelConfig(**{**vars(CFG), "tie_embeddings": tied})
    params = random_params(cfg, head=head)
    save_hf(tmp_path / "m", cfg, params)
    cfg_back, back = load_hf(tmp_path / "m")
    assert cfg_back == cfg
    assert_same(back, params)


def test_bfloat16_rounds_once(tmp_path):
    params = random_params(CFG)
    save_hf(tmp_path / "m", CFG, params, dtype="bfloat16")
    cfg, back = load_hf(tmp_path / "m", dtype="bfloat16")
    assert cfg.dtype == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_same(back, rounded)
    tensors = load_file_bf16(tmp_path / "m" / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}


def load_file_bf16(file: Path) -> dict:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118


def test_names_and_layout_by_hand(saved):
    params = random_params(CFG)
    tensors = load_file(saved / "model.safetensors")
    assert len(tensors) == 2 + 2 * 9
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    # output row 2·e + 3 is head 2, component 3
    np.testing.assert_array_equal(
        q[2 * 6 + 3], params["blocks"]["attn"]["q"]["kernel"][1, :, 2, 3]
    )
    o = tensors["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(
        o[:, 3 * 6 + 5], params["blocks"]["attn"]["o"]["kernel"][0, 3, 5]
    )
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(down, params["blocks"]["mlp"]["down"]["kernel"][1].T)


def test_zero_bias_is_not_written(tmp_path):
    params = random_params(CFG, head=True)
    save_hf(tmp_path / "a", CFG, params)
    assert "score.bias" in load_file(tmp_path / "a/model.safetensors")
    params["head"]["bias"] = jnp.zeros(1)
    save_hf(tmp_path / "b", CFG, params)
    assert "score.bias" not in load_file(tmp_path / "b/model.safetensors")
    assert_same(load_hf(tmp_path / "b")[1], params)


def test_sharded_directory(saved):
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for i, part in enumerate((names[:7], names[7:])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, saved / file)
        where |= dict.fromkeys(part, file)
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert_same(load_hf(saved)[1], random_params(CFG))
    (saved / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-1.safetensors: named in"):
        load_hf(saved)
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        load_hf(saved)


def test_what_may_be_extra(saved):
    tensors = load_file(saved / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    edit_tensors(
        saved,
        **{
            "lm_head.weight": embedding,
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32),
        },
    )
    assert_same(load_hf(saved)[1], random_params(CFG))
    edit_tensors(saved, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        load_hf(saved)


def test_host_leaves_are_numpy(saved):
    leaves = jax.tree.leaves(load_hf(saved, host=True)[1])
    assert all(type(x) is np.ndarray for x in leaves)


# ── straight onto a mesh ─────────────────────────────────────────────────────


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_leaves_are_laid_out_as_they_are_read(tmp_path, sizes):
    cfg = dataclasses.replace(CFG, vocab_size=16)
    params = random_params(cfg)
    save_hf(tmp_path / "m", cfg, params)
    mesh = make_mesh(sizes)
    again, placed = load_hf(tmp_path / "m", mesh=mesh)
    assert again == cfg
    assert_same(placed, params)
    want = tree_shardings(params, mesh)
    same = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), placed, want
    )
    assert all(jax.tree.leaves(same))
    shard = placed["blocks"]["mlp"]["up"]["kernel"].addressable_shards[0]
    assert shard.data.size == CFG.n_layers * 32 * 64 // 8
