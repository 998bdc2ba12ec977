"""A param tree from named tensors, a layer at a time; every name accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from jppo.config import ModelConfig
from jppo.models.hf_layout import Shape, Tensor, layout

Params = dict[str, Any]
ALIASES = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX in transformers 5
BUFFERS = (".inv_freq", ".attn.bias", ".attn.masked_bias", "attention.bias",
           "attention.masked_bias")  # fmt: skip

Layers = Iterator[np.ndarray]
Place = Callable[[str, Shape, Layers], Any]


def on_host(key: str, shape: Shape, layers: Layers) -> np.ndarray:
    """A leaf as one NumPy array, f32."""
    if not key.startswith("blocks/"):
        return np.ascontiguousarray(next(layers), np.float32)
    out = np.empty(shape, np.float32)
    for i, x in enumerate(layers):
        out[i] = x
    return out


def params_from(
    cfg: ModelConfig,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    *,
    head: bool,
    where: Path,
    place: Place = on_host,
) -> Params:
    """The stacked param tree from tensors under Hugging Face names.

    read: a tensor as f32. place: makes a leaf from the layers that come to it one
    after another (one, for what is not stacked), so that no more than a tensor need
    be on the host.
    """
    tensors, names = layout(cfg, head=head), set(names)
    spelled = _spelling(cfg, tensors, names)
    _check_names(cfg, names, spelled, head, where)

    def pieces(tensor: Tensor, key: str) -> Layers:
        for i in range(cfg.n_layers if tensor.layered else 1):
            name = spelled[tensor.name.format(i=i)]
            if name not in names:  # only the bias of a scalar head may be absent
                yield np.zeros(tensor.shape, np.float32)
                continue
            x = read(name)
            if x.shape != tensor.shape:
                raise ValueError(
                    f"{where}: {name} has shape {x.shape}, expected {tensor.shape}"
                )
            yield tensor.cut(x)[key]

    flat: dict[str, Any] = {}
    for tensor in tensors:
        for key, shape in tensor.leaves.items():
            shape = (cfg.n_layers, *shape) if tensor.layered else shape
            flat[key] = place(key, shape, pieces(tensor, key))
    tied = cfg.tie_embeddings and not head
    for name in sorted(names & {"lm_head.weight", "embed_out.weight"} if tied else ()):
        embedding = spelled[tensors[0].name]
        if not np.array_equal(read(name), read(embedding)):
            raise ValueError(
                f"{where}: tie_word_embeddings is true, but {name} differs "
                f"from {embedding}"
            )
    return unflatten_dict(flat, sep="/")


def _spelling(
    cfg: ModelConfig, tensors: list[Tensor], names: set[str]
) -> dict[str, str]:
    """Our name of every tensor → its name in the files.

    Base models are saved without the prefix of their class; some heads have two names.
    """
    prefix = tensors[0].name.split(".")[0] + "."
    bare = not any(name.startswith(prefix) for name in names)

    def theirs(name: str) -> str:
        for other in (name.removeprefix(prefix) if bare else name, ALIASES.get(name)):
            if other in names:
                return other
        return name

    return {
        name: theirs(name)
        for tensor in tensors
        for i in range(cfg.n_layers if tensor.layered else 1)
        for name in (tensor.name.format(i=i),)
    }


def _check_names(
    cfg: ModelConfig,
    names: set[str],
    spelled: dict[str, str],
    head: bool,
    where: Path,
) -> None:
    expected = set(spelled.values())
    allowed = set(expected)  # what may be there; a bias may also be absent
    if cfg.tie_embeddings and not head:
        allowed |= {"lm_head.weight", "embed_out.weight"}
    missing = expected - names - {"score.bias"}
    buffers = {name for name in names - expected if name.endswith(BUFFERS)}
    extra = names - allowed - buffers
    # Both at once: a renamed tensor is one that is missing and one that is not known.
    odd = [
        f"{len(which)} {what} tensor(s): {', '.join(sorted(which)[:3])}"
        for what, which in (("missing", missing), ("unexpected", extra))
        if which
    ]
    if odd:
        raise ValueError(f"{where}: {'; '.join(odd)}")
