"""A run before its first step: everything loaded, checked and cut into trees.

Whatever can be wrong is found here, on the host, as one line before any device work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jppo import rewards
from jppo.config import Config, ConfigError, LoraConfig, Setup
from jppo.data import PromptData, PromptRow, read_rows
from jppo.loading import Model, load_model, load_scorer, lora_of, tokenizer_gap
from jppo.rewards import RewardFn
from jppo.sharding import make_mesh
from jppo.state import init_state, init_trees, make_roles
from jppo.text_reward import TextReward
from jppo.tokens import pad_token_id, stop_strings, stop_token_ids
from jppo.types import Frozen, TrainState


class Job(NamedTuple):
    """A run, checked and loaded, before its first step."""

    setup: Setup
    policy: Model
    prompts: PromptData
    reward_fn: RewardFn | None
    state: TrainState
    frozen: Frozen
    notes: tuple[str, ...] = ()  # what its user should know, a line each


def _check_room(cfg: Config, reward: Model, prompt_tokens: int) -> None:
    """A reward model that reads the policy's ids needs room for them."""
    need, room = (
        prompt_tokens + cfg.sampling.max_new_tokens,
        reward.config.max_positions,
    )
    if need > room:
        raise ConfigError(
            f"prompt and response take {need} tokens, the reward model reads {room}"
        )


def make_setup(
    cfg: Config, policy: Model, reward: Model | None, prompt_tokens: int
) -> Setup:
    """Everything static about the programs. Raises ConfigError where roles clash."""
    if reward is not None:
        _check_room(cfg, reward, prompt_tokens)
    stops = stop_token_ids(policy.tokenizer, cfg.sampling.stop)
    return Setup(
        **make_roles(cfg, policy.config, reward and reward.config),
        prompt_tokens=prompt_tokens,
        stop_ids=stops,
        pad_id=pad_token_id(policy.tokenizer, stops),
        reward_lora=(reward and lora_of(reward)) or LoraConfig(),
        stop_strings=_stop_strings(cfg, policy),
    )


def _stop_strings(cfg: Config, policy: Model) -> tuple[str, ...]:
    found = stop_strings(policy.tokenizer, cfg.sampling.stop)
    if found and cfg.run.fused:
        raise ConfigError(
            f"sampling.stop text {found[0]!r} is several tokens, for which the host"
            " must look: set run.fused=false, or use texts of one token"
        )
    return found


def _load_policy(cfg: Config, source: str | Path | Model) -> Model:
    """A model that can be trained to write. Raises ConfigError."""
    model = load_model(source, cfg.policy.dtype)
    if model.tokenizer is None:
        raise ConfigError(
            "the policy has no tokenizer: Model(config, params, tokenizer)"
        )
    if "head" in model.params:
        raise ConfigError("the policy has a scalar head: that is a reward model")
    if len(model.tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(model.tokenizer)} ids, the policy"
            f" {model.config.vocab_size}"
        )
    return model


def prepare(
    cfg: Config,
    *,
    policy: str | Path | Model | None = None,
    prompts: Sequence[PromptRow] | None = None,
    reward_fn: RewardFn | None = None,
    reward_model: str | Path | Model | None = None,
) -> Job:
    """Loads and checks everything that a run needs; no device program runs yet."""
    if reward_fn is None and cfg.reward.function:
        reward_fn = rewards.find_function(cfg.reward.function)
    reward_model = reward_model or cfg.reward.model or None
    if (reward_fn is None) == (reward_model is None):
        raise ConfigError(
            "give exactly one source of scores: a reward function (reward_fn,"
            " reward.function) or a reward model (reward_model, reward.model)"
        )
    if cfg.run.fused and reward_fn is not None:
        raise ConfigError("run.fused=true needs a reward model, not a Python function")
    if prompts is None:
        if not cfg.data.prompts:
            raise ConfigError("data.prompts is not set: give a file of prompts")
        prompts = read_rows(cfg.data.prompts)
    model = _load_policy(cfg, policy or cfg.policy.path)
    stops = stop_token_ids(model.tokenizer, cfg.sampling.stop)
    data = PromptData(
        prompts,
        model.tokenizer,
        cfg.data,
        pad_id=pad_token_id(model.tokenizer, stops),
        room=model.config.max_positions - cfg.sampling.max_new_tokens,
        seed=cfg.run.seed,
    )
    if reward_fn is not None:
        rewards.check_columns(reward_fn, data.names)
    notes = ()
    if data.dropped:
        notes = (f"dropped {data.dropped} prompts that are too long",)
    scorer = None
    if reward_model is not None:
        scorer = load_scorer(
            reward_model,
            policy=model,
            policy_source=policy or cfg.policy.path,
            share=cfg.critic.init != "reward",
        )
        if gap := tokenizer_gap(model, scorer):
            reward_fn, scorer = _reads_texts(cfg, scorer, gap), None
            notes += (
                f"the reward model has a tokenizer of its own ({gap}): responses are"
                " decoded, and encoded anew for it",
            )
    setup = make_setup(cfg, model, scorer, data.width)
    key = jax.random.key(cfg.run.seed)
    init_key, state_key = jax.random.split(key)
    actor, critic, frozen = init_trees(
        setup, model.params, scorer and scorer.params, init_key
    )
    state = init_state(setup, actor, critic, state_key)
    return Job(setup, model, data, reward_fn, state, frozen, notes)


def _reads_texts(cfg: Config, scorer: Model, gap: str) -> RewardFn:
    """A reward function around a model that does not read the policy's token ids."""
    for key, needs in (
        ("run.fused=true", cfg.run.fused),
        ("critic.init=reward", cfg.critic.init == "reward"),
    ):
        if needs:
            raise ConfigError(
                f"{key} needs one tokenizer, but policy and reward model have different"
                f" ones: {gap}"
            )
    mesh = make_mesh(dataclasses.asdict(cfg.mesh))
    return TextReward(scorer, mesh, cfg.ppo.batch_size)
