"""Texts from a model: batches of prompts through the jitted decoder, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jppo import decode
from jppo.config import ConfigError
from jppo.data import PromptData, PromptRow, read_rows
from jppo.fitting import check_rows
from jppo.generate_config import GenerateConfig
from jppo.loading import Model, load_model
from jppo.sharding import batch_sharding, make_mesh, replicated, tree_shardings
from jppo.steplog import completions
from jppo.tokens import pad_token_id, stop_strings, stop_token_ids, trim_rollout


def generate_texts(
    cfg: GenerateConfig,
    *,
    model: str | Path | Model | None = None,
    prompts: Sequence[PromptRow] | None = None,
) -> Iterator[dict[str, Any]]:
    """One dict a completion, in the order of the prompts, as soon as a batch is done.

    Keys: the row's own columns, `prompt`, `completion`, `tokens` (their number),
    `stopped` (whether it ended by itself). Row i of the prompts draws with keys of its
    own: its text depends on run.seed, not on the batch. Raises ConfigError or
    DataError before anything is compiled.
    """
    loaded = load_model(model or cfg.model.path, cfg.model.dtype, key="model.path")
    if loaded.tokenizer is None or "head" in loaded.params:
        what = "no tokenizer" if loaded.tokenizer is None else "a scalar head"
        raise ConfigError(f"a model with {what} cannot write texts")
    stops = stop_token_ids(loaded.tokenizer, cfg.sampling.stop)
    data = PromptData(
        _rows(cfg, prompts),
        loaded.tokenizer,
        cfg.data,
        pad_id=pad_token_id(loaded.tokenizer, stops),
        room=loaded.config.max_positions - cfg.sampling.max_new_tokens,
        seed=cfg.run.seed,
    )
    mesh = make_mesh(dataclasses.asdict(cfg.mesh))
    check_rows(mesh, cfg.run.batch_size, "run.batch_size")
    return _generate(cfg, loaded, data, mesh, stops)


def _rows(cfg: GenerateConfig, prompts: Sequence[PromptRow] | None) -> Any:
    if prompts is not None:
        return prompts
    if bool(cfg.prompt) == bool(cfg.data.prompts):
        raise ConfigError("give one of prompt (a text) and data.prompts (a file)")
    return [cfg.prompt] if cfg.prompt else read_rows(cfg.data.prompts)


def _generate(
    cfg: GenerateConfig,
    model: Model,
    data: PromptData,
    mesh: jax.sharding.Mesh,
    stops: tuple[int, ...],
) -> Iterator[dict[str, Any]]:
    shape = dataclasses.replace(model.config, dtype=cfg.model.dtype)
    params = jax.device_put(model.params, tree_shardings(model.params, mesh))
    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    several = stop_strings(model.tokenizer, cfg.sampling.stop)

    def program(params, prompts, key):
        return decode.generate(
            shape,
            params,
            prompts,
            key,
            settings=cfg.sampling,
            stop_ids=stops,
            pad_id=data.pad_id,
        )

    in_shardings = (tree_shardings(params, mesh), rows, everywhere)
    jitted = jax.jit(program, in_shardings=in_shardings, out_shardings=rows)
    keys = [jax.random.key(cfg.run.seed)]
    keys = list(jax.random.split(keys[0], cfg.run.samples))
    size = cfg.run.batch_size
    for start in range(0, len(data), size):
        indices = list(range(start, min(start + size, len(data))))
        batch = data.batch(indices, size)
        row: Any = np.arange(start, start + size, dtype=np.int32)
        batch = dataclasses.replace(batch, row=row)
        drawn = []
        for key in keys:
            with jax.set_mesh(mesh):
                rolled = jitted(params, jax.device_put(batch, rows), key)
            if several:
                rolled = trim_rollout(
                    model.tokenizer,
                    rolled,
                    several,
                    stop_ids=stops,
                    pad_id=data.pad_id,
                )
            drawn.append((completions(model.tokenizer, rolled), jax.device_get(rolled)))
        for at, i in enumerate(indices):
            for texts, rolled in drawn:
                yield data.rows[i] | {
                    "prompt": data.texts([i])[0],
                    "completion": texts[at],
                    "tokens": int(rolled.lengths[at]),
                    "stopped": bool(rolled.stopped[at]),
                }
