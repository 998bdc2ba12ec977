"""GGUF files: a tiny one written here, and the real one's tokenizer."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_dirs import CFG, random_params
from safetensors.numpy import load_file

from jppo.loading import load_model
from jppo.models.gguf import NAMES, convert_gguf, gguf_tokenizer, load_gguf
from jppo.models.hf import load_hf, save_hf
from jppo.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

TOKENS = ["<|end|>", "a", "b", "1", "2", "Ġ", "ab", "Ġa", "ĠĠ", "Ċ", "12"]
MERGES = ["a b", "Ġ a", "Ġ Ġ", "1 2"]


def permute(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Pairs of components (i, i + e/2) become neighbours, head by head."""
    order = [c for i in range(head_dim // 2) for c in (i, i + head_dim // 2)]
    return x.reshape(-1, head_dim, x.shape[-1])[:, order].reshape(x.shape)


def write_gguf(
    file: Path, hf_dir: Path, arch: str = "llama", cfg=CFG, **changes
) -> None:
    """stored: tensor name in the GGUF → (its kind, its bytes as rows of uint8)."""
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(cfg.max_positions)
    writer.add_embedding_length(cfg.d_model)
    writer.add_block_count(cfg.n_layers)
    writer.add_feed_forward_length(cfg.d_mlp)
    writer.add_head_count(cfg.n_heads)
    writer.add_head_count_kv(cfg.n_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
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
            x = permute(x, cfg.head_dim)
        kind, name = None, f"{layer}{hf_names[stem]}.weight"
        if name in changes.get("stored", {}):
            kind, x = changes["stored"][name]
        writer.add_tensor(name, x, raw_dtype=kind)
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


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
WIDE = dataclasses.replace(CFG, d_model=256, n_layers=1)  # K blocks hold 256 weights
GATE = "blk.0.ffn_gate.weight"


def block_bytes(kind, x: np.ndarray) -> np.ndarray:
    """x as this kind stores it; the package cannot write K blocks: random ones then."""
    try:
        return gguf.quantize(x, kind)
    except NotImplementedError:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        rows = np.random.default_rng(0).integers(0, 256, (len(x), size), np.uint8)
        scales = slice(0, 4) if kind.name == "Q4_K" else slice(-2, None)
        width = len(range(*scales.indices(size))) // 2
        rows[:, scales] = np.full((len(x), width), 0.01, np.float16).view(np.uint8)
        return rows


def by_hand(kind: str, row: np.ndarray) -> np.ndarray:
    """256 weights of one K block, from the format's description in ggml-common.h."""
    if kind == "Q6_K":  # 128 + 64 bytes of low and high bits, 16 scales, d
        low, high, scales = row[:128], row[128:192], row[192:208].view(np.int8)
        d = np.float32(row[208:].view(np.float16)[0])
        out = np.zeros(256, np.float32)
        for i in range(256):
            half, j = divmod(i, 128)
            quarter, k = divmod(j, 32)
            nibble = low[64 * half + k + 32 * (quarter % 2)] >> 4 * (quarter // 2)
            bits = high[32 * half + k] >> 2 * quarter
            value = (nibble & 15 | (bits & 3) << 4).astype(np.int32) - 32
            out[i] = d * scales[i // 16] * value
        return out
    d, least = row[:4].view(np.float16).astype(np.float32)
    packed, nibbles, out = row[4:16].astype(np.int32), row[16:], []
    for j in range(8):  # sub-blocks of 32, with a scale and a minimum of 6 bits each
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
            low = packed[j + 4] >> 4 | packed[j] >> 6 << 4
        part = nibbles[32 * (j // 2) : 32 * (j // 2) + 32] >> 4 * (j % 2) & 15
        out.append(d * scale * part - least * low)
    return np.concatenate(out)


@pytest.mark.parametrize("name", KINDS)
def test_dequantises(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    params = random_params(WIDE)
    save_hf(tmp_path / "m", WIDE, params)
    want = np.asarray(params["blocks"]["mlp"]["gate"]["kernel"][0]).T
    rows = block_bytes(kind, np.ascontiguousarray(want))
    write_gguf(
        tmp_path / "q.gguf", tmp_path / "m", cfg=WIDE, stored={GATE: (kind, rows)}
    )
    cfg, got = load_gguf(tmp_path / "q.gguf")
    assert cfg == WIDE
    got = np.asarray(got["blocks"]["mlp"]["gate"]["kernel"][0]).T
    if name.endswith("_K"):
        want = np.stack([by_hand(name, row) for row in rows])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert got.std() > 0.1
        return
    blocks = np.abs(want).reshape(-1, 8, 32).max(-1).repeat(32, -1)
    spread = np.ptp(want.reshape(-1, 8, 32), axis=-1).repeat(32, -1)
    step = {
        "F32": 0,
        "F16": 2**-11 * np.abs(want) + 2**-25,  # and subnormals
        "BF16": 2**-8 * np.abs(want),
        "Q8_0": 0.6 * blocks / 127,  # the scale itself is float16
        "Q4_0": 1.01 * blocks / 8,
        "Q4_1": 0.55 * spread / 15,
    }[name]
    assert (np.abs(got - want) <= step).all()
    assert (name == "F32") == (got == want).all()


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
