"""GGUF files of the Llama family: read once, kept as a Hugging Face directory.

A GGUF holds quantised weights and a tokenizer in one file. Two things in it would
fail silently: the rows of q and k are permuted (GGUF pairs rotary dimensions that lie
next to each other, Hugging Face pairs the two halves), and the pre-tokenizer is only
named, so it is rebuilt here by that name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config import ModelConfig
from jppo.models.hf import check_dtype, save_hf
from jppo.models.hf_read import Params, params_from
from jppo.models.tokenizer import import_transformers

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMAL, CONTROL = 1, 3  # token types


def load_gguf(
    file: str | os.PathLike, *, dtype: str = "float32"
) -> tuple[ModelConfig, Params]:
    """Config and dequantised f32 params of a GGUF file of architecture `llama`.

    Raises ImportError without the package `gguf`, FileNotFoundError, and ValueError
    for another architecture, scaled rotary embeddings or an incomplete file.
    """
    check_dtype(dtype)
    cfg, params = _read_model(_open(file), Path(file), dtype)
    return cfg, jax.tree.map(jnp.asarray, params)


def convert_gguf(file: str | os.PathLike, folder: str | os.PathLike) -> Path:
    """Writes the GGUF's model and tokenizer as a Hugging Face directory, once.

    The folder appears when it is complete; one that is already there is left alone.
    """
    file, folder = Path(file), Path(folder)
    done = folder / "config.json"
    if done.is_file():
        return folder
    reader = _open(file)
    tokenizer = _read_tokenizer(reader, file)
    cfg, params = _read_model(reader, file, "float32")
    try:
        save_hf(folder, cfg, params, tokenizer)
    except OSError:
        if not done.is_file():  # else another process was faster
            raise
    return folder


def gguf_tokenizer(file: str | os.PathLike) -> Any:
    """The `PreTrainedTokenizerFast` that a GGUF file describes (`smollm` only)."""
    return _read_tokenizer(_open(file), Path(file))


def gguf_headers(
    file: str | os.PathLike,
) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], str, int]]]:
    """(facts, tensors as (name, shape, quantisation, bytes)) without the weights."""
    reader = _open(file)
    names = [k for k, f in reader.fields.items() if not k.startswith("GGUF.")]
    values = {k: reader.get_field(k).contents() for k in names}
    short = {k: v for k, v in values.items() if len(str(v)) <= 60}
    return short, [
        (t.name, tuple(map(int, t.shape[::-1])), t.tensor_type.name, int(t.n_bytes))
        for t in reader.tensors
    ]


def _open(file: str | os.PathLike) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError(
            'GGUF files need the package gguf: pip install "jppo[quickstart]"'
        ) from None
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as e:
        raise ValueError(f"{file}: not a complete GGUF file ({e})") from None
    arch = _fields(reader, Path(file))("general.architecture")
    if arch != "llama":
        raise ValueError(f"{file}: architecture {arch!r} is not 'llama'")
    return reader


def _fields(reader: Any, file: Path) -> Any:
    """Looks up one metadata key; without a default the key has to be there."""

    def get(key: str, *default: Any) -> Any:
        field = reader.get_field(key)
        if field is not None:
            return field.contents()
        if not default:
            raise ValueError(f"{file}: {key} is missing")
        return default[0]

    return get


def _read_model(reader: Any, file: Path, dtype: str) -> tuple[ModelConfig, Params]:
    from gguf import dequantize

    tensors = {_hf_name(t.name): t for t in reader.tensors}
    cfg = _config(reader, file, dtype, tied="lm_head.weight" not in tensors)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        x = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if not np.isfinite(x).all():
            raise ValueError(f"{file}: {tensor.name} has a NaN or an infinity")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return unpermute(x, cfg.head_dim)
        return x

    return cfg, params_from(cfg, tensors, read, head=False, where=file)


def unpermute(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k `[heads·e, d]` from GGUF's rotary pairing to Hugging Face's."""
    return x.reshape(-1, head_dim // 2, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, i, stem = stem.split(".", 2)
        layer = f"model.layers.{i}."
    return f"{layer}{NAMES[stem]}.{kind}" if stem in NAMES else name


def _config(reader: Any, file: Path, dtype: str, *, tied: bool) -> ModelConfig:
    get = _fields(reader, file)
    scaling = get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(
            f"{file}: llama.rope.scaling.type {scaling!r} is not supported"
        )
    d, h = get("llama.embedding_length"), get("llama.attention.head_count")
    head_dim = int(get("llama.attention.key_length", d // h))
    if get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{file}: rotary embeddings over part of a head")
    return ModelConfig(
        vocab_size=len(get("tokenizer.ggml.tokens")),
        d_model=int(d),
        n_layers=int(get("llama.block_count")),
        n_heads=int(h),
        n_kv_heads=int(get("llama.attention.head_count_kv", h)),
        head_dim=head_dim,
        d_mlp=int(get("llama.feed_forward_length")),
        rope_theta=_decimal(get("llama.rope.freq_base", 10000.0)),
        norm_eps=_decimal(get("llama.attention.layer_norm_rms_epsilon")),
        tie_embeddings=tied,
        max_positions=int(get("llama.context_length")),
        dtype=dtype,
    )


def _decimal(x: float) -> float:
    """1e-5 from the 9.999999747378752e-06 that single precision made of it."""
    return float(str(np.float32(x)))


def _read_tokenizer(reader: Any, file: Path) -> Any:
    get = _fields(reader, file)
    kind = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", None)
    if kind != ("gpt2", "smollm"):
        raise ValueError(
            f"{file}: the tokenizer {kind} is not supported, only ('gpt2', 'smollm')"
        )
    if get("tokenizer.ggml.add_bos_token", False):
        raise ValueError(f"{file}: tokenizer.ggml.add_bos_token is not supported")
    transformers = import_transformers()
    tokens = get("tokenizer.ggml.tokens")
    special = _special(tokens, get("tokenizer.ggml.token_type"), file)
    bpe = _byte_bpe(tokens, get("tokenizer.ggml.merges"), special)
    names = {
        "bos_token": get("tokenizer.ggml.bos_token_id", None),
        "eos_token": get("tokenizer.ggml.eos_token_id", None),
        "unk_token": get("tokenizer.ggml.unknown_token_id", None),
        "pad_token": get("tokenizer.ggml.padding_token_id", None),
    }
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        clean_up_tokenization_spaces=False,
        model_max_length=int(get("llama.context_length")),
        **{key: tokens[i] for key, i in names.items() if i is not None},
    )
    tokenizer.chat_template = get("tokenizer.chat_template", None)
    return tokenizer


def _special(tokens: list[str], types: list[int], file: Path) -> list[str]:
    odd = set(types) - {NORMAL, CONTROL}
    if odd:
        raise ValueError(f"{file}: token type(s) {sorted(odd)} are not supported")
    return [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]


def _byte_bpe(tokens: list[str], merges: list[str], special: list[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    bpe = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(a, b) for a, _, b in (m.partition(" ") for m in merges)],
        )
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return bpe
