"""A supervised run before its first step: fine-tuning, a reward model, or DPO.

Loaded, checked and cut into trees on the host, so that whatever is wrong is one line
before any device work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jppo.config import ConfigError, ModelConfig
from jppo.examples import encode_example, encode_pair
from jppo.fit_config import DPOConfig, FitAny, RewardFitConfig, SFTConfig
from jppo.fit_data import PairSource, RankedSource, Source, TextSource, fitting
from jppo.fitting import Objective, check_rows
from jppo.loading import Model, load_model
from jppo.models import transformer
from jppo.models.lora import overlay
from jppo.preference import dpo_objective, reward_objective
from jppo.readers import DataError, Row, Rows, place, read_table
from jppo.sft import sft_objective
from jppo.sharding import make_mesh
from jppo.state import frozen_layers, init_fit, make_optimizer, trainable
from jppo.tokens import pad_token_id
from jppo.types import FitFrozen, FitState, Params


class Start(NamedTuple):
    """A model cut into what learns and what does not; `cfg` says how it runs."""

    cfg: ModelConfig
    params: Params
    frozen: FitFrozen


class FitJob(NamedTuple):
    """A supervised run, checked and loaded, before its first step."""

    config: FitAny
    mesh: Mesh
    tokenizer: Any
    start: Start
    tx: optax.GradientTransformation
    state: FitState
    objective: Objective
    data: Source
    held_out: Source | None
    steps: int
    dropped: int  # rows that were too long


def start_of(cfg: FitAny, model: Model) -> Start:
    """Where training begins: heads and adapters fresh, where the model has none.

    Raises ConfigError for a model of the wrong kind.
    """
    ranks = isinstance(cfg, RewardFitConfig)
    params = dict(model.params)
    if "head" in params and not ranks:
        raise ConfigError("the model has a scalar head: that is a reward model")
    head_key, lora_key = jax.random.split(jax.random.key(cfg.run.seed))
    if ranks:
        params.pop("lm_head", None)
        if "head" not in params:
            params["head"] = transformer.init_head(head_key, model.config.d_model)
    shape = dataclasses.replace(
        model.config,
        dtype=cfg.model.dtype,
        remat=cfg.model.remat,
        unroll=cfg.model.unroll,
        lora_scale=cfg.model.lora.scale,
    )
    cut = frozen_layers(shape, cfg.model.train_layers, "model.train_layers")
    base, rest = transformer.split_params(params, cut)
    learns = trainable(rest, cfg.model.lora, lora_key)
    adapted = learns is not rest
    under = rest if adapted or isinstance(cfg, DPOConfig) else {}
    under = {k: v for k, v in under.items() if k != "head"}
    return Start(
        shape, learns, transformer.as_frozen(FitFrozen(base, under), shape.dtype)
    )


def whole_params(frozen: FitFrozen, params: Params) -> Params:
    """The fitted model as one tree, with an adapter's factors in it."""
    return transformer.merge_params(frozen.base, overlay(frozen.under, params))


def objective_of(cfg: FitAny, shape: ModelConfig) -> Objective:
    """The loss of a run, of (params, frozen, batch)."""
    match cfg:
        case SFTConfig():
            return partial(sft_objective, shape, cfg.sft.head_chunk)
        case RewardFitConfig():
            return partial(reward_objective, shape, cfg.reward)
        case DPOConfig():
            return partial(dpo_objective, shape, cfg.dpo)


def _encoded(
    cfg: FitAny, tokenizer: Any, rows: Sequence[Row], limit: int
) -> tuple[list[Any], int]:
    """(examples or pairs that fit, number of rows that were dropped)."""
    places = [place(rows, i) for i in range(len(rows))]
    if isinstance(cfg, SFTConfig):
        found: list[Any] = [
            encode_example(tokenizer, row, where)
            for row, where in zip(rows, places, strict=True)
        ]
        lengths = [len(example.ids) for example in found]
    else:
        found = [
            encode_pair(tokenizer, row, where)
            for row, where in zip(rows, places, strict=True)
        ]
        lengths = [max(len(p.chosen.ids), len(p.rejected.ids)) for p in found]
    kept = fitting(lengths, limit, cfg.data.overlong, places)
    return [found[i] for i in kept], len(rows) - len(kept)


def make_source(
    cfg: FitAny, model: Model, rows: Sequence[Any], pad_id: int
) -> tuple[Source, int]:
    """(rows as batches of token ids, number of rows that were too long).

    Raises DataError naming file and row.
    """
    if not rows:
        raise DataError("the list of examples is empty")
    rows = rows if isinstance(rows, Rows) else [_as_row(row) for row in rows]
    limit = min(cfg.data.max_tokens, model.config.max_positions)
    kept, dropped = _encoded(cfg, model.tokenizer, rows, limit)
    if isinstance(cfg, SFTConfig):
        packing = cfg.sft.packing
        return TextSource(kept, width=limit, pad_id=pad_id, packing=packing), dropped
    make: Callable[..., Source]
    make = RankedSource if isinstance(cfg, RewardFitConfig) else PairSource
    return make(kept, pad_id=pad_id), dropped


def _as_row(row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"an example is a dict of columns, got {row!r}")
    return row


def prepare_fit(
    cfg: FitAny,
    *,
    model: str | Path | Model | None = None,
    rows: Sequence[Any] | None = None,
    held_out: Sequence[Any] | None = None,
) -> FitJob:
    """Loads and checks all that a supervised run needs; no device program runs yet."""
    if rows is None:
        if not cfg.data.train:
            raise ConfigError("data.train is not set: give a file of examples")
        rows = read_table(cfg.data.train)
    if held_out is None and cfg.data.eval:
        held_out = read_table(cfg.data.eval)
    loaded = load_model(model or cfg.model.path, cfg.model.dtype, key="model.path")
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer: Model(config, params, tokenizer)"
        )
    if len(tokenizer) > loaded.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} ids, the model"
            f" {loaded.config.vocab_size}"
        )
    mesh = make_mesh(dataclasses.asdict(cfg.mesh))
    size = cfg.fit.batch_size // cfg.fit.micro_batches
    check_rows(
        mesh,
        size,
        f"a micro-batch (fit.batch_size {cfg.fit.batch_size} / fit.micro_batches"
        f" {cfg.fit.micro_batches})",
    )
    start = start_of(cfg, loaded)
    pad_id = pad_token_id(tokenizer, (0,))
    data, dropped = make_source(cfg, loaded, rows, pad_id)
    judged = None
    if held_out is not None:
        judged, more = make_source(cfg, loaded, held_out, pad_id)
        dropped += more
    steps = cfg.fit.steps or math.ceil(cfg.fit.epochs * len(data) / cfg.fit.batch_size)
    tx = make_optimizer(cfg.optim, steps)
    return FitJob(
        config=cfg,
        mesh=mesh,
        tokenizer=tokenizer,
        start=start,
        tx=tx,
        state=init_fit(tx, start.params),
        objective=objective_of(cfg, start.cfg),
        data=data,
        held_out=judged,
        steps=steps,
        dropped=dropped,
    )
