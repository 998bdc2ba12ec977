"""What one decoder is: its shape, and the traits in which families differ."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


def opt(default: Any, doc: str) -> Any:
    """A config field with its default and the one line that `--help` shows."""
    return dataclasses.field(default=default, metadata={"doc": doc})


LAYER_KINDS = ("full", "sliding", "nope", "sliding-nope")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and traits of one decoder. The defaults are Llama's.

    A family of models (`models/families.py`) is a choice of these traits and a table
    of names; nothing else in jppo knows a family.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_mlp: int
    family: str = opt("llama", "how its files spell config and tensors")
    # positions
    positions: Literal["rope", "learned"] = opt("rope", "rotary, or a learned table")
    rope_theta: float = opt(10000.0, "base of the rotary frequencies")
    rope_theta_local: float | None = opt(
        None, "base in sliding layers, without scaling; null = as elsewhere"
    )
    rope_dims: int | None = opt(None, "rotated dims of a head; null = all")
    rope_scaling: tuple[Any, ...] = opt(
        (), "('linear', factor) or ('llama3', factor, low, high, original length)"
    )
    max_positions: int = opt(2048, "longest sequence the model was trained for")
    # attention
    window: int | None = opt(None, "tokens that sliding layers see, themselves too")
    layers: tuple[str, ...] = opt(
        (), f"kind of each layer, of {LAYER_KINDS}; empty = all full, or all sliding"
    )
    query_scale: float | None = opt(None, "factor of the scores; null = 1/√head_dim")
    attn_softcap: float | None = opt(None, "c · tanh(scores / c)")
    qk_norm: Literal["none", "head", "all"] = opt(
        "none", "RMSNorm of queries and keys, a head or all heads at once"
    )
    qkv_bias: bool = opt(False, "biases of q, k and v")
    o_bias: bool = opt(False, "bias of the attention output")
    # blocks
    norm: Literal["rms", "layer"] = opt("rms", "RMSNorm, or LayerNorm with bias")
    norm_eps: float = opt(1e-5, "added to the mean square inside the norm")
    norm_offset: float = opt(0.0, "added to stored norm scales (Gemma: 1)")
    norm_at: Literal["pre", "post", "both"] = opt(
        "pre", "norms before attention and MLP, after them, or both"
    )
    parallel: bool = opt(False, "attention and MLP read the same input")
    gated: bool = opt(True, "MLP with a gate: act(x W_gate) ⊙ x W_up")
    act: Literal["silu", "gelu", "gelu_tanh"] = opt("silu", "activation of the MLP")
    mlp_bias: bool = opt(False, "biases of the MLP")
    # ends
    embed_scale: float = opt(1.0, "factor of the embeddings (Gemma: √d)")
    tie_embeddings: bool = opt(True, "the LM head is the transposed embedding")
    final_softcap: float | None = opt(None, "c · tanh(logits / c)")
    # how it runs
    dtype: str = opt("float32", "compute dtype; trained params stay float32")
    remat: bool = opt(False, "recompute each block in the backward pass")
    unroll: int | None = opt(
        None, "blocks unrolled per step of the scan over layers; null = all of up to 4"
    )
    lora_scale: float = opt(1.0, "α/r of the low-rank adapters in the tree, if any")
