"""What load_hf and save_hf refuse: one clear line each, never another model."""

import jax.numpy as jnp
import numpy as np
import pytest
from hf_dirs import CFG, edit_config, edit_tensors, random_params
from safetensors.numpy import load_file

from jppo.config import ModelConfig
from jppo.models.hf import load_hf, save_hf

# ── config.json ──────────────────────────────────────────────────────────────


def test_rope_theta_old_and_new_spelling(saved):
    edit_config(saved, rope_parameters=...)
    assert load_hf(saved)[0].rope_theta == 1e5
    rope = {"rope_type": "default", "rope_theta": 7.0}
    edit_config(saved, rope_parameters=rope, rope_theta=...)
    assert load_hf(saved)[0].rope_theta == 7.0
    edit_config(saved, rope_theta=8.0)
    with pytest.raises(ValueError, match="rope_theta is 8.0 and in rope_parameters 7"):
        load_hf(saved)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "bloom"}, "model_type 'bloom'.*only llama, mistral"),
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"architectures": ["LlamaModel"]}, "architecture LlamaModel"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"attention_bias": 1}, "attention_bias = 1 is not true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.*'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "parameters.factor = None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary part of a head"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": "32"}, "hidden_size = '32' is not a positive integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0 is not a positive number"),
    ],
)
def test_config_refusals_name_feature_and_file(saved, change, words):
    edit_config(saved, **change)
    with pytest.raises(ValueError, match=words) as e:
        load_hf(saved)
    assert str(saved / "config.json") in str(e.value)
    assert "\n" not in str(e.value)


def test_rope_scaling_must_be_said_once(saved):
    linear = {"rope_type": "linear", "factor": 2.0}
    edit_config(saved, rope_scaling=linear)
    with pytest.raises(ValueError, match="rope_scaling is .* and rope_parameters"):
        load_hf(saved)
    edit_config(saved, rope_parameters=...)
    assert load_hf(saved)[0].rope_scaling == ("linear", 2.0)


def test_default_rope_scaling_is_fine(saved):
    edit_config(saved, rope_scaling={"type": "default"})
    assert load_hf(saved)[0] == CFG


# ── files ────────────────────────────────────────────────────────────────────

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        ({UP: None}, f"1 missing tensor.*{UP}"),
        ({"policy.extra": np.ones(2, np.float32)}, "1 unexpected tensor.*policy.extra"),
        ({"score.bias": np.ones(1, np.float32)}, "unexpected tensor.*score.bias"),
        ({UP: np.ones((32, 64), np.float32)}, r"\(32, 64\), expected \(64, 32\)"),
        ({UP: np.ones((1, 64, 32), np.float32)}, r"shape \(1, 64, 32\), expected"),
        (
            {UP: None, UP.replace("up_proj", "up"): np.ones((64, 32), np.float32)},
            f"1 missing tensor.*{UP}.*1 unexpected tensor.*mlp.up.weight",
        ),
        ({UP: np.full((64, 32), np.nan, np.float32)}, f"{UP} has a NaN"),
        ({UP: np.ones((64, 32), np.int8)}, f"{UP} is I8"),
    ],
)
def test_tensor_refusals(saved, change, words):
    edit_tensors(saved, **change)
    with pytest.raises(ValueError, match=words) as e:
        load_hf(saved)
    assert str(saved) in str(e.value) and "\n" not in str(e.value)


def test_untied_needs_its_head(saved):
    edit_config(saved, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="missing tensor.*lm_head.weight"):
        load_hf(saved)


def test_head_must_be_what_the_config_says(tmp_path, saved):
    edit_config(saved, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ValueError, match="missing tensor.*score.weight"):
        load_hf(saved)
    save_hf(tmp_path / "rm", CFG, random_params(CFG, head=True))
    edit_config(tmp_path / "rm", architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match="unexpected tensor.*score"):
        load_hf(tmp_path / "rm")
    edit_config(tmp_path / "rm", architectures=["LlamaForSequenceClassification"])
    score = load_file(tmp_path / "rm" / "model.safetensors")["score.weight"]
    edit_tensors(tmp_path / "rm", **{"score.weight": None, "v_head.weight": score})
    with pytest.raises(ValueError, match="missing.*score.weight.*v_head.weight"):
        load_hf(tmp_path / "rm")
    edit_tensors(tmp_path / "rm", **{"v_head.weight": None, "score.weight": score})
    edit_config(tmp_path / "rm", architectures=...)
    assert "head" in load_hf(tmp_path / "rm")[1]


def test_absent_and_broken_files(tmp_path, saved):
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        load_hf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="dtype 'float16' is not one of"):
        load_hf(saved, dtype="float16")
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file") as e:
        load_hf(saved)
    assert str(weights) in str(e.value)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_hf(saved)
    (saved / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle.*convert"):
        load_hf(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not JSON"):
        load_hf(saved)
    (saved / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_hf(saved)


def test_save_refusals_leave_nothing(tmp_path, saved):
    params = random_params(CFG)
    with pytest.raises(FileExistsError, match="already there"):
        save_hf(saved, CFG, params)
    with pytest.raises(ValueError, match="dtype 'int8'"):
        save_hf(tmp_path / "x", CFG, params, dtype="int8")
    with pytest.raises(ValueError, match="does not fit the config: lm_head/kernel"):
        save_hf(
            tmp_path / "x",
            ModelConfig(**{**vars(CFG), "tie_embeddings": False}),
            params,
        )
    bad = {**params, "norm": {"scale": jnp.full(32, jnp.nan)}}
    with pytest.raises(ValueError, match="norm/scale has a NaN"):
        save_hf(tmp_path / "x", CFG, bad)
    bad = {**params, "norm": {"scale": jnp.ones(33)}}
    with pytest.raises(ValueError, match=r"norm/scale has shape \(33,\), expected"):
        save_hf(tmp_path / "x", CFG, bad)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
