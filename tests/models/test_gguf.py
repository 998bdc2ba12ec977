"""GGUF files: a tiny one written here, and the real one's tokenizer."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_dirs import CFG, random_params
from safetensors.numpy import load_file

from jppo.loading import load_model
from jppo.models.gguf import NAMES, convert_gguf, gguf_tokenizer, load_gguf
from jppo.models.hf import load_hf
from jppo.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

TOKENS = ["<|end|>", "a", "b", "1", "2", "Ġ", "ab", "Ġa", "ĠĠ", "Ċ", "12"]
MERGES = ["a b", "Ġ a", "Ġ Ġ", "1 2"]


def permute(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Pairs of components (i, i + e/2) become neighbours, head by head."""
    order = [c for i in range(head_dim // 2) for c in (i, i + head_dim // 2)]
    return x.reshape(-1, head_dim, x.shape[-1])[:, order].reshape(x.shape)


def write_gguf(file: Path, hf_dir: Path, arch: str = "llama", **changes) -> None:
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(CFG.max_positions)
    writer.add_embedding_length(CFG.d_model)
    writer.add_block_count(CFG.n_layers)
    writer.add_feed_forward_length(CFG.d_mlp)
    writer.add_head_count(CFG.n_heads)
    writer.add_head_count_kv(CFG.n_kv_heads)
    writer.add_key_length(CFG.head_dim)
    writer.add_rope_freq_base(CFG.rope_theta)
    writer.add_layer_norm_rms_eps(CFG.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    if "scaling" in changes:
        writer.add_rope_scaling_type(changes["scaling"])
    hf_names = {hf: ours for ours, hf in NAMES.items()}
    for name, x in load_file(hf_dir / "model.safetensors").items():
        layer, stem = "", name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, i, stem = stem.split(".", 3)
            layer = f"blk.{i}."
        if stem.endswith(("q_proj", "k_proj")):
            x = permute(x, CFG.head_dim)
        kind = None
        if hf_names[stem] == changes.get("quantise"):
            kind = gguf.GGMLQuantizationType.Q8_0
            x = gguf.quantize(x, kind)
        writer.add_tensor(f"{layer}{hf_names[stem]}.weight", x, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path, saved) -> Path:
    write_gguf(tmp_path / "tiny.gguf", saved)
    return tmp_path / "tiny.gguf"


def test_weights_and_config(tiny):
    cfg, params = load_gguf(tiny)
    assert cfg == CFG
    jax.tree.map(np.testing.assert_array_equal, params, random_params(CFG))


def test_is_a_model_for_training(tiny):
    model = load_model(str(tiny))
    cfg, params = load_gguf(tiny)
    assert model.config == cfg
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    assert len(model.tokenizer) <= cfg.vocab_size


def test_converted_once_and_completely(tiny, tmp_path):
    folder = convert_gguf(tiny, tmp_path / "out")
    cfg, params = load_hf(folder)
    assert cfg == CFG
    jax.tree.map(np.testing.assert_array_equal, params, random_params(CFG))
    a, b = load_tokenizer(folder), gguf_tokenizer(tiny)
    text = "ab 1212\n  2<|end|>"
    assert a(text)["input_ids"] == b(text)["input_ids"]
    assert a.chat_template == "{{ messages }}"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    convert_gguf(tiny, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert not list(tmp_path.glob(".out*"))


def test_tokenizer_splits_digits_and_blanks(tiny):
    tok = gguf_tokenizer(tiny)
    # "12" has a merge of its own, yet digits stay single; the blanks before a
    # digit stay together
    assert tok("ab a  12<|end|>")["input_ids"] == [6, 7, 8, 3, 4, 0]
    assert tok.decode([6, 7, 8, 3, 4]) == "ab a  12"
    assert (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id) == (0, 0, 0)


def test_dequantises(tmp_path, saved):
    """A Q8_0 block of 32 values keeps each to half a step of float16."""
    write_gguf(tmp_path / "q.gguf", saved, quantise="ffn_gate")
    got = load_gguf(tmp_path / "q.gguf")[1]["blocks"]["mlp"]["gate"]["kernel"]
    want = random_params(CFG)["blocks"]["mlp"]["gate"]["kernel"]
    step = np.abs(want).max(1, keepdims=True) / 127  # d = 32: a block an output
    assert (np.abs(got - want) <= 0.6 * step).all()
    assert (got != want).any()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"arch": "qwen2"}, "architecture 'qwen2' is not 'llama'"),
        ({"scaling": gguf.RopeScalingType.LINEAR}, "rope.scaling.type 'linear' is not"),
        ({"pre": "llama-bpe"}, "tokenizer .*llama-bpe.* is not supported"),
    ],
)
def test_refusals(tmp_path, saved, changes, words):
    file = tmp_path / "odd.gguf"
    write_gguf(file, saved, **changes)
    with pytest.raises(ValueError, match=words) as e:
        convert_gguf(file, tmp_path / "out")
    assert str(file) in str(e.value) and not (tmp_path / "out").exists()


def test_absent_and_truncated(tiny, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no.gguf: no such file"):
        load_gguf(tmp_path / "no.gguf")
    whole = tiny.read_bytes()
    for keep in (10, 300, len(whole) - 500):
        tiny.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match="tiny.gguf: not a complete GGUF file"):
            load_gguf(tiny)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "jppo\[quickstart\]"'):
        load_gguf(tiny)
