"""Models out of a run: from its last checkpoint to directories that others open."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jppo.checkpoint import CheckpointError, Checkpoints, fit_identity, identity
from jppo.config import Config, ConfigError, PolicyConfig
from jppo.fit_config import FitAny
from jppo.fit_job import start_of, whole_params
from jppo.job import make_setup
from jppo.loading import Model, load_model, load_scorer, tokenizer_gap
from jppo.models.hf import save_hf
from jppo.models.lora import split_adapter
from jppo.models.peft import save_adapter
from jppo.run_folder import TITLES, read_config
from jppo.state import (
    init_fit,
    init_state,
    init_trees,
    make_optimizer,
    whole_critic,
    whole_policy,
)

Part = Literal["model", "critic", "adapter"]


class Opened(NamedTuple):
    """A run's models as one of its checkpoints has them."""

    step: int
    model: Model  # the policy of PPO, or what was fitted; an adapter beside its weights
    critic: Model | None
    base: str  # where the model began


def open_run(folder: str | Path, step: int | None = None) -> Opened:
    """Reads a run's checkpoint, the newest or that of `step`, without its data.

    Raises ConfigError where the folder holds no run or a model that it began with is
    not named there (a run on models in memory), CheckpointError where none fits.
    """
    cfg = read_config(folder)
    source: PolicyConfig = cfg.policy if isinstance(cfg, Config) else cfg.model
    key = "policy.path" if isinstance(cfg, Config) else "model.path"
    if not source.path:
        raise ConfigError(
            f"{folder}: the run began with a model in memory (its {key} is empty); its"
            " export is what the run itself wrote"
        )
    if not (Path(folder) / "checkpoints").is_dir():
        raise CheckpointError(f"{folder}: no checkpoints")
    model = load_model(source.path, source.dtype)
    store = Checkpoints(Path(folder) / "checkpoints")
    try:
        if isinstance(cfg, Config):
            return _open_ppo(cfg, model, store, step)
        return _open_fit(cfg, model, store, step)
    finally:
        store.close()


def _open_ppo(
    cfg: Config, model: Model, store: Checkpoints, step: int | None
) -> Opened:
    reward = None
    if cfg.reward.model:
        reward = load_scorer(
            cfg.reward.model,
            policy=model,
            policy_source=cfg.policy.path,
            share=cfg.critic.init != "reward",
        )
        reward = None if tokenizer_gap(model, reward) else reward
    setup = make_setup(cfg, model, reward, prompt_tokens=1)
    key = jax.random.key(0)  # all that it makes is read from the checkpoint
    actor, critic, frozen = init_trees(
        setup, model.params, reward and reward.params, key
    )
    like = init_state(setup, actor, critic, key)
    state, _ = store.restore(like, identity(setup, frozen), step)
    return Opened(
        int(state.step),
        Model(setup.actor, whole_policy(state, frozen), model.tokenizer),
        Model(setup.critic, whole_critic(setup, state, frozen), model.tokenizer),
        cfg.policy.path,
    )


def _open_fit(
    cfg: FitAny, model: Model, store: Checkpoints, step: int | None
) -> Opened:
    start = start_of(cfg, model)
    like = init_fit(make_optimizer(cfg.optim, 1), start.params)
    who = fit_identity(TITLES[type(cfg)], start.cfg, like, start.frozen)
    state, _ = store.restore(like, who, step)
    whole = whole_params(start.frozen, state.params)
    return Opened(
        int(state.step), Model(start.cfg, whole, model.tokenizer), None, cfg.model.path
    )


def export(
    folder: str | Path,
    out: str | Path,
    *,
    part: Part = "model",
    dtype: str = "float32",
    step: int | None = None,
) -> Opened:
    """Writes a part of a run as a directory that `transformers` or `peft` opens.

    part: `model`, an adapter merged in; `critic` of a PPO run, as a classifier with
    one label; `adapter` alone, in PEFT's format. Raises FileExistsError where `out`
    has content.
    """
    found = open_run(folder, step)
    model = found.critic if part == "critic" else found.model
    if model is None:
        raise ConfigError(f"{folder}: only a PPO run has a critic")
    if part != "adapter":
        save_hf(out, model.config, model.params, model.tokenizer, dtype=dtype)
        return found
    _, adapter = split_adapter(model.params)
    if not adapter:
        raise ConfigError(f"{folder}: the run has no adapter (its lora.rank is 0)")
    if "head" in model.params:
        adapter = adapter | {"head": model.params["head"]}
    tokenizer = model.tokenizer
    save_adapter(out, model.config, adapter, base=found.base, tokenizer=tokenizer)
    return found
