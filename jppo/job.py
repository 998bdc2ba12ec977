"""A run before its first step: everything loaded, checked and cut into trees.

Whatever can be wrong is found here, on the host, as one line before any device work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jppo import rewards
from jppo.config import Config, ConfigError, ModelConfig, Setup
from jppo.data import PromptData, PromptRow, read_rows
from jppo.models.gguf import gguf_tokenizer, load_gguf
from jppo.models.hf import load_hf
from jppo.models.tokenizer import load_tokenizer
from jppo.rewards import RewardFn
from jppo.state import init_state, init_trees
from jppo.tokens import pad_token_id, stop_strings, stop_token_ids
from jppo.types import Frozen, Params, TrainState


class Model(NamedTuple):
    """A model in memory: its shape, a whole param tree, and its tokenizer."""

    config: ModelConfig
    params: Params
    tokenizer: Any = None


class Job(NamedTuple):
    """A run, checked and loaded, before its first step."""

    setup: Setup
    policy: Model
    prompts: PromptData
    reward_fn: RewardFn | None
    state: TrainState
    frozen: Frozen


def load_model(
    source: str | Path | Model, dtype: str = "float32", *, key: str = "policy.path"
) -> Model:
    """A model from a Hugging Face directory or a GGUF file, or itself if in memory.

    key: the setting that an error message names where there is no source.
    """
    if isinstance(source, Model):
        return source
    if str(source).endswith(".gguf"):
        return Model(*load_gguf(source, dtype=dtype), gguf_tokenizer(source))
    if not str(source):
        raise ConfigError(f"{key} is not set: give a Hugging Face directory")
    cfg, params = load_hf(source, dtype=dtype, host=True)
    return Model(cfg, params, load_tokenizer(source))


def frozen_layers(cfg: ModelConfig, train_layers: int | None, key: str) -> int | None:
    """Blocks below those that learn; None where every weight learns."""
    if train_layers is None:
        return None
    if not 0 <= train_layers <= cfg.n_layers:
        raise ConfigError(
            f"{key} is {train_layers}, the model has {cfg.n_layers} blocks"
        )
    return cfg.n_layers - train_layers


def _check_reward(
    cfg: Config, policy: Model, reward: Model, prompt_tokens: int
) -> None:
    """A reward model reads the policy's ids: same tokenizer, and room for them."""
    ids, size = reward.config.vocab_size, policy.config.vocab_size
    if ids != size:
        raise ConfigError(
            f"the reward model has {ids} token ids, the policy {size}: they must share"
            " a tokenizer"
        )
    if reward.tokenizer is not None:
        ours, theirs = policy.tokenizer.get_vocab(), reward.tokenizer.get_vocab()
        odd = sorted(k for k in ours.keys() | theirs if ours.get(k) != theirs.get(k))
        if odd:
            raise ConfigError(
                f"policy and reward model have different tokenizers: {odd[0]!r} is"
                f" {ours.get(odd[0])} and {theirs.get(odd[0])}"
            )
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
    actor = dataclasses.replace(
        policy.config,
        dtype=cfg.policy.dtype,
        remat=cfg.policy.remat,
        unroll=cfg.policy.unroll,
        lora_scale=cfg.policy.lora.scale,
    )
    from_reward = cfg.critic.init == "reward"
    if from_reward and reward is None:
        raise ConfigError("critic.init=reward needs a reward model (reward.model)")
    if reward is not None:
        _check_reward(cfg, policy, reward, prompt_tokens)
    like = {"dtype": actor.dtype, "remat": actor.remat, "unroll": actor.unroll}
    reward_cfg = reward and dataclasses.replace(reward.config, **like)
    critic = reward_cfg if from_reward else actor
    assert critic is not None
    if not from_reward or cfg.critic.lora.rank:
        critic = dataclasses.replace(critic, lora_scale=cfg.critic.lora.scale)
    layers = cfg.critic.train_layers
    shared = cfg.critic.layout == "shared"
    cut = None if shared else frozen_layers(critic, layers, "critic.train_layers")
    stops = stop_token_ids(policy.tokenizer, cfg.sampling.stop)
    return Setup(
        config=cfg,
        actor=actor,
        critic=critic,
        reward=reward_cfg,
        prompt_tokens=prompt_tokens,
        stop_ids=stops,
        pad_id=pad_token_id(policy.tokenizer, stops),
        actor_frozen=frozen_layers(
            actor, cfg.policy.train_layers, "policy.train_layers"
        ),
        critic_frozen=cut,
        reward_on_critic_base=from_reward,
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
    model = load_model(policy or cfg.policy.path, cfg.policy.dtype)
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
    scorer = None if reward_model is None else load_model(reward_model)
    if scorer is not None and "head" not in scorer.params:
        raise ConfigError(
            f"{reward_model} is not a reward model: it has no scalar head"
        )
    setup = make_setup(cfg, model, scorer, data.width)
    key = jax.random.key(cfg.run.seed)
    init_key, state_key = jax.random.split(key)
    actor, critic, frozen = init_trees(
        setup, model.params, scorer and scorer.params, init_key
    )
    state = init_state(setup, actor, critic, state_key)
    return Job(setup, model, data, reward_fn, state, frozen)
