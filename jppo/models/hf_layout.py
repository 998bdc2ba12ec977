"""Which tensor of a Hugging Face file is which leaf of jppo's param tree.

One table serves reading, writing, GGUF and adapters. Hugging Face stores a weight as
`[outputs, inputs]` (GPT-2 as `[inputs, outputs]`) with each side flattened, one
tensor a layer, and some families several leaves in one tensor; jppo stores
`[*inputs, *outputs]`, all layers stacked.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jppo.config import ModelConfig

Shape = tuple[int, ...]


class Tensor(NamedTuple):
    """One tensor of a file, `{i}` in its name being the layer, and its leaves.

    leaves: path → shape in jppo. inputs: how many axes of a leaf are inputs, 0 for
    what has none. flip: stored as [outputs, inputs]. flat: a bias, of one axis there.
    by_head: leaves take turns a head (GPT-NeoX) instead of following one another.
    """

    name: str
    leaves: dict[str, Shape]
    inputs: int = 0
    flip: bool = False
    flat: bool = False
    by_head: bool = False

    def _sizes(self) -> list[int]:
        return [math.prod(shape[self.inputs :]) for shape in self.leaves.values()]

    @property
    def shape(self) -> Shape:
        first = next(iter(self.leaves.values()))
        if not self.inputs and not self.flat:
            return first
        out = (sum(self._sizes()),)
        ins = (math.prod(first[: self.inputs]),) if self.inputs else ()
        return out + ins if self.flip else ins + out

    @property
    def layered(self) -> bool:
        return "{i}" in self.name

    def cut(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The tensor's leaves, each in its own shape."""
        x = x.T if self.flip and self.inputs else x
        sizes = self._sizes()
        if len(sizes) == 1:
            pieces = [x]
        elif self.by_head:
            heads = next(iter(self.leaves.values()))[self.inputs]
            x = x.reshape(*x.shape[:-1], heads, len(sizes), -1)
            pieces = [x[..., j, :] for j in range(len(sizes))]
        else:
            pieces = np.split(x, np.cumsum(sizes)[:-1], axis=-1)
        return {
            key: np.ascontiguousarray(piece).reshape(shape)
            for piece, (key, shape) in zip(pieces, self.leaves.items(), strict=True)
        }

    def join(self, leaves: dict[str, np.ndarray]) -> np.ndarray:
        """The inverse of `cut`."""
        pieces = [leaves[key] for key in self.leaves]
        if not self.inputs and not self.flat:
            return pieces[0]
        if self.by_head:
            x = np.stack(pieces, axis=-2)
            flat = [x.reshape(*x.shape[: self.inputs], -1)]
        else:
            flat = [p.reshape(*p.shape[: self.inputs], -1) for p in pieces]
        x = np.concatenate(flat, axis=-1).reshape(-1, sum(self._sizes()))
        x = x if self.inputs else x[0]
        return x.T if self.flip and self.inputs else x


class _Table:
    """Collects tensors under the names of one family."""

    def __init__(self, cfg: ModelConfig):
        self.cfg, self.tensors = cfg, []
        d, f = cfg.d_model, cfg.d_mlp
        self.shapes: dict[str, Shape] = {
            "attn/q": (d, cfg.n_heads, cfg.head_dim),
            "attn/k": (d, cfg.n_kv_heads, cfg.head_dim),
            "attn/v": (d, cfg.n_kv_heads, cfg.head_dim),
            "attn/o": (cfg.n_heads, cfg.head_dim, d),
            "mlp/gate": (d, f),
            "mlp/up": (d, f),
            "mlp/down": (f, d),
        }

    def add(self, name: str, *keys: str, shape: Shape = (), **how: Any) -> None:
        """A tensor that is no projection."""
        self.tensors.append(Tensor(name, dict.fromkeys(keys, shape), **how))

    def dense(
        self, name: str, *parts: str, bias: bool, flip: bool = True, by_head=False
    ) -> None:
        """The weight (and bias) of one or several fused projections."""
        inputs = 2 if parts == ("attn/o",) else 1
        kernels = {f"blocks/{p}/kernel": self.shapes[p] for p in parts}
        self.tensors.append(
            Tensor(f"{name}.weight", kernels, inputs, flip, by_head=by_head)
        )
        if bias:
            biases = {f"blocks/{p}/bias": self.shapes[p][inputs:] for p in parts}
            self.tensors.append(
                Tensor(f"{name}.bias", biases, flat=True, by_head=by_head)
            )

    def norm(self, name: str, key: str, width: int | None = None) -> None:
        shape = (width or self.cfg.d_model,)
        self.add(f"{name}.weight", f"{key}/scale", shape=shape)
        if self.cfg.norm == "layer":
            self.add(f"{name}.bias", f"{key}/bias", shape=shape)


def _llama(table: _Table, cfg: ModelConfig) -> str:
    at, v = "model.layers.{i}.", cfg.vocab_size
    table.add("model.embed_tokens.weight", "embed/embedding", shape=(v, cfg.d_model))
    norms = {
        "pre": {"attn_norm": "input", "mlp_norm": "post_attention"},
        "post": {"attn_post": "post_attention", "mlp_post": "post_feedforward"},
        "both": {
            "attn_norm": "input",
            "attn_post": "post_attention",
            "mlp_norm": "pre_feedforward",
            "mlp_post": "post_feedforward",
        },
    }[cfg.norm_at]
    for ours, theirs in norms.items():
        table.norm(f"{at}{theirs}_layernorm", f"blocks/{ours}")
    if cfg.family == "phi3":
        table.dense(f"{at}self_attn.qkv_proj", "attn/q", "attn/k", "attn/v", bias=False)
        table.dense(f"{at}mlp.gate_up_proj", "mlp/gate", "mlp/up", bias=False)
    else:
        for x in "qkv":
            name = f"{at}self_attn.{x}_proj"
            table.dense(name, f"attn/{x}", bias=cfg.qkv_bias)
        for x in ("gate", "up"):
            table.dense(f"{at}mlp.{x}_proj", f"mlp/{x}", bias=cfg.mlp_bias)
    table.dense(f"{at}self_attn.o_proj", "attn/o", bias=cfg.o_bias)
    table.dense(f"{at}mlp.down_proj", "mlp/down", bias=cfg.mlp_bias)
    if cfg.qk_norm != "none":
        whole = cfg.qk_norm == "all"
        for x, heads in (("q", cfg.n_heads), ("k", cfg.n_kv_heads)):
            width = cfg.head_dim * (heads if whole else 1)
            table.norm(f"{at}self_attn.{x}_norm", f"blocks/attn/{x}_norm", width)
    table.norm("model.norm", "norm")
    return "lm_head.weight"


def _gpt2(table: _Table, cfg: ModelConfig) -> str:
    at, d = "transformer.h.{i}.", cfg.d_model
    table.add("transformer.wte.weight", "embed/embedding", shape=(cfg.vocab_size, d))
    table.add("transformer.wpe.weight", "embed/positions", shape=(cfg.max_positions, d))
    table.norm(f"{at}ln_1", "blocks/attn_norm")
    table.norm(f"{at}ln_2", "blocks/mlp_norm")
    for name, *parts in (
        ("attn.c_attn", "attn/q", "attn/k", "attn/v"),
        ("attn.c_proj", "attn/o"),
        ("mlp.c_fc", "mlp/up"),
        ("mlp.c_proj", "mlp/down"),
    ):
        table.dense(at + name, *parts, bias=True, flip=False)
    table.norm("transformer.ln_f", "norm")
    return "lm_head.weight"


def _gpt_neox(table: _Table, cfg: ModelConfig) -> str:
    at, qkv = "gpt_neox.layers.{i}.", ("attn/q", "attn/k", "attn/v")
    embedding = (cfg.vocab_size, cfg.d_model)
    table.add("gpt_neox.embed_in.weight", "embed/embedding", shape=embedding)
    table.norm(f"{at}input_layernorm", "blocks/attn_norm")
    table.norm(f"{at}post_attention_layernorm", "blocks/mlp_norm")
    name = f"{at}attention.query_key_value"
    table.dense(name, *qkv, bias=cfg.qkv_bias, by_head=True)
    table.dense(f"{at}attention.dense", "attn/o", bias=cfg.o_bias)
    table.dense(f"{at}mlp.dense_h_to_4h", "mlp/up", bias=True)
    table.dense(f"{at}mlp.dense_4h_to_h", "mlp/down", bias=True)
    table.norm("gpt_neox.final_layer_norm", "norm")
    return "embed_out.weight"


def layout(cfg: ModelConfig, *, head: bool) -> list[Tensor]:
    """Every tensor of a model of this config, with a scalar head or an LM head."""
    table = _Table(cfg)
    fill = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}.get(cfg.family, _llama)
    lm_head = fill(table, cfg)
    if head:
        shape = (cfg.d_model, 1)
        table.add("score.weight", "head/kernel", shape=shape, inputs=1, flip=True)
        table.add("score.bias", "head/bias", shape=(1,))
    elif not cfg.tie_embeddings:
        shape = (cfg.d_model, cfg.vocab_size)
        table.add(lm_head, "lm_head/kernel", shape=shape, inputs=1, flip=True)
    return table.tensors
