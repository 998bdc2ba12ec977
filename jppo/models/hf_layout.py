"""Which tensor of a Hugging Face Llama is which leaf of jppo's param tree.

One table serves reading, writing and GGUF. Hugging Face stores a weight as
`[outputs, inputs]` with each side flattened, one tensor a layer; jppo stores
`[*inputs, *outputs]`, all layers stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from jppo.config import ModelConfig

Params = dict[str, Any]


class Leaf(NamedTuple):
    """A param's Hugging Face name, its shape here, and how many axes are inputs.

    With `inputs = 0` both sides hold the same array.
    """

    name: str
    shape: tuple[int, ...]
    inputs: int = 0

    @property
    def hf_shape(self) -> tuple[int, ...]:
        if not self.inputs:
            return self.shape
        ins, outs = self.shape[: self.inputs], self.shape[self.inputs :]
        return math.prod(outs), math.prod(ins)

    def from_hf(self, x: np.ndarray) -> np.ndarray:
        return (x.T if self.inputs else x).reshape(self.shape)

    def to_hf(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.hf_shape[::-1]).T if self.inputs else x


def layout(cfg: ModelConfig, *, head: bool) -> dict[str, Leaf]:
    """`/`-joined path in the param tree → `Leaf`; `{i}` in a name is the layer."""
    d, f, v = cfg.d_model, cfg.d_mlp, cfg.vocab_size
    h, k, e = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
    at = "model.layers.{i}."
    leaves = {
        "embed/embedding": Leaf("model.embed_tokens.weight", (v, d)),
        "blocks/attn_norm/scale": Leaf(at + "input_layernorm.weight", (d,)),
        "blocks/attn/q/kernel": Leaf(at + "self_attn.q_proj.weight", (d, h, e), 1),
        "blocks/attn/k/kernel": Leaf(at + "self_attn.k_proj.weight", (d, k, e), 1),
        "blocks/attn/v/kernel": Leaf(at + "self_attn.v_proj.weight", (d, k, e), 1),
        "blocks/attn/o/kernel": Leaf(at + "self_attn.o_proj.weight", (h, e, d), 2),
        "blocks/mlp_norm/scale": Leaf(at + "post_attention_layernorm.weight", (d,)),
        "blocks/mlp/gate/kernel": Leaf(at + "mlp.gate_proj.weight", (d, f), 1),
        "blocks/mlp/up/kernel": Leaf(at + "mlp.up_proj.weight", (d, f), 1),
        "blocks/mlp/down/kernel": Leaf(at + "mlp.down_proj.weight", (f, d), 1),
        "norm/scale": Leaf("model.norm.weight", (d,)),
    }
    if head:
        leaves["head/kernel"] = Leaf("score.weight", (d, 1), 1)
        leaves["head/bias"] = Leaf("score.bias", (1,))
    elif not cfg.tie_embeddings:
        leaves["lm_head/kernel"] = Leaf("lm_head.weight", (d, v), 1)
    return leaves


def params_from(
    cfg: ModelConfig,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    *,
    head: bool,
    where: Path,
) -> Params:
    """The stacked param tree (NumPy, f32) from tensors under Hugging Face names."""
    leaves = layout(cfg, head=head)
    names = set(names)
    _check_names(cfg, leaves, names, where)

    def leaf_of(leaf: Leaf, name: str) -> np.ndarray:
        x = read(name)
        if x.shape != leaf.hf_shape:
            raise ValueError(
                f"{where}: {name} has shape {x.shape}, expected {leaf.hf_shape}"
            )
        return leaf.from_hf(x)

    flat: dict[str, np.ndarray] = {}
    for key, leaf in leaves.items():
        if "{i}" in leaf.name:
            value = np.empty((cfg.n_layers, *leaf.shape), np.float32)
            for i in range(cfg.n_layers):
                value[i] = leaf_of(leaf, leaf.name.format(i=i))
        elif key == "head/bias" and leaf.name not in names:
            value = np.zeros(leaf.shape, np.float32)
        else:
            value = np.ascontiguousarray(leaf_of(leaf, leaf.name), np.float32)
        flat[key] = value
    if cfg.tie_embeddings and not head and "lm_head.weight" in names:
        if not np.array_equal(read("lm_head.weight"), flat["embed/embedding"]):
            raise ValueError(
                f"{where}: tie_word_embeddings is true, but lm_head.weight differs "
                "from model.embed_tokens.weight"
            )
    return unflatten_dict(flat, sep="/")


def _check_names(
    cfg: ModelConfig, leaves: dict[str, Leaf], names: set[str], where: Path
) -> None:
    expected = {
        leaf.name.format(i=i)
        for leaf in leaves.values()
        for i in range(cfg.n_layers if "{i}" in leaf.name else 1)
    }
    allowed = set(expected)  # what may be there; a bias may also be absent
    if cfg.tie_embeddings and "head/kernel" not in leaves:
        allowed.add("lm_head.weight")
    missing = expected - names - {"score.bias"}
    buffers = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    extra = names - allowed - buffers
    for what, which in (("missing", missing), ("unexpected", extra)):
        if which:
            some = ", ".join(sorted(which)[:3])
            raise ValueError(f"{where}: {len(which)} {what} tensor(s): {some}")
