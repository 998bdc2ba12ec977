"""Models from wherever they are: directories, GGUF files, adapters, memory."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.config import ConfigError, LoraConfig, ModelConfig
from jppo.models.gguf import gguf_tokenizer, load_gguf
from jppo.models.hf import load_hf
from jppo.models.lora import (
    flatten,
    is_factor,
    merged_layer,
    overlay,
    split_adapter,
    unflatten,
)
from jppo.models.peft import CONFIG as ADAPTER
from jppo.models.peft import adapter_config, load_adapter
from jppo.models.tokenizer import load_tokenizer
from jppo.types import Params


class Model(NamedTuple):
    """A model in memory: its shape, a whole param tree, and its tokenizer."""

    config: ModelConfig
    params: Params
    tokenizer: Any = None


def load_model(
    source: str | Path | Model, dtype: str = "float32", *, key: str = "policy.path"
) -> Model:
    """A model from a directory or a GGUF file, or itself if in memory.

    A directory is a Hugging Face model or a PEFT adapter, which is merged into the
    base that it names. key: the setting that an error message names where there is no
    source.
    """
    if isinstance(source, Model):
        return source
    if str(source).endswith(".gguf"):
        return Model(*load_gguf(source, dtype=dtype), gguf_tokenizer(source))
    if not str(source):
        raise ConfigError(f"{key} is not set: give a Hugging Face directory")
    if base_of(source) is not None:
        return merged(load_adapted(source, dtype))
    cfg, params = load_hf(source, dtype=dtype, host=True)
    return Model(cfg, params, load_tokenizer(source))


# Adapters


def base_of(source: str | Path | Model) -> Path | None:
    """The directory of the base of an adapter; None where `source` is no adapter.

    Raises FileNotFoundError where the adapter names a base that is not on this disk.
    """
    if isinstance(source, Model) or not (Path(source) / ADAPTER).is_file():
        return None
    name = adapter_config(Path(source)).get("base_model_name_or_path") or ""
    for base in (Path(name), Path(source) / name):
        if name and base.is_dir():
            return base.resolve()
    raise FileNotFoundError(
        f"{source}: its base model {name!r} is no directory here: set"
        f" base_model_name_or_path in {ADAPTER} to one"
    )


def load_adapted(
    source: str | Path, dtype: str = "float32", base: Model | None = None
) -> Model:
    """A base with the factors of an adapter in its tree.

    base: the model that the adapter names, where it is in memory already; the result
    then holds the same arrays.
    """
    if base is None:
        folder = base_of(source)
        assert folder is not None
        base = load_model(folder, dtype)
    adapter = load_adapter(source, base.config)
    params = base.params
    if "head" in adapter.params:
        params = {k: v for k, v in params.items() if k != "lm_head"}
    cfg = dataclasses.replace(base.config, lora_scale=adapter.scale)
    own = (Path(source) / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(source) if own else base.tokenizer
    return Model(cfg, overlay(params, adapter.params), tokenizer)


def merged(model: Model) -> Model:
    """The same model without factors, on the host, a layer at a time."""
    flat = flatten(model.params)
    scale = model.config.lora_scale
    adapted = {k.rpartition("/")[0] + "/kernel" for k in flat if is_factor(k)}
    if not adapted:
        return model
    out = {
        key: np.stack(
            [merged_layer(flat, key, i, scale) for i in range(model.config.n_layers)]
        )
        if key in adapted
        else leaf
        for key, leaf in flat.items()
        if not is_factor(key)
    }
    cfg = dataclasses.replace(model.config, lora_scale=1.0)
    return Model(cfg, unflatten(out), model.tokenizer)


def lora_of(model: Model) -> LoraConfig | None:
    """Rank, α and targets of the factors in a model's tree.

    None where it has none, or of several ranks.
    """
    factors = flatten(split_adapter(model.params)[1])
    ranks = {leaf.shape[-1] for key, leaf in factors.items() if key.endswith("lora_a")}
    if len(ranks) != 1:
        return None
    (rank,) = ranks
    paths = sorted({re.escape(key.rpartition("/")[0]) for key in factors})
    return LoraConfig(
        rank=rank,
        alpha=model.config.lora_scale * rank,
        targets=f"^({'|'.join(paths)})$",
    )


def load_scorer(
    source: str | Path | Model,
    *,
    policy: Model,
    policy_source: str | Path | Model,
    share: bool,
) -> Model:
    """A reward model. Raises ConfigError where it has no scalar head.

    share: an adapter over the policy's own base stands on the policy's arrays, in
    place of a second copy of them.
    """
    base = base_of(source)
    mine = not isinstance(policy_source, Model) and str(policy_source)
    if share and base is not None and mine and base == Path(mine).resolve():
        assert not isinstance(source, Model)
        scorer = load_adapted(source, base=policy)
        scorer = scorer if lora_of(scorer) else merged(scorer)
    else:
        scorer = load_model(source)
    if "head" not in scorer.params:
        name = "the reward model" if isinstance(source, Model) else source
        raise ConfigError(f"{name} is not a reward model: it has no scalar head")
    if scorer.tokenizer is not None:
        ids, room = len(scorer.tokenizer), scorer.config.vocab_size
        if ids > room:
            raise ConfigError(
                f"the reward model's tokenizer has {ids} ids, the model {room}: they do"
                " not belong together"
            )
    return scorer


def tokenizer_gap(policy: Model, reward: Model) -> str | None:
    """How the tokenizers of two models differ, in words; None where they agree."""
    if reward.tokenizer is None:
        ids, size = reward.config.vocab_size, policy.config.vocab_size
        return None if ids == size else f"{ids} token ids against {size}"
    ours, theirs = policy.tokenizer.get_vocab(), reward.tokenizer.get_vocab()
    odd = sorted(k for k in ours.keys() | theirs if ours.get(k) != theirs.get(k))
    if not odd:
        return None
    return f"{odd[0]!r} is {ours.get(odd[0])} and {theirs.get(odd[0])}"
