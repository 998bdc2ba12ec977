"""Training: the only place with a clock, files and a progress bar.

`train` prepares everything on the host, so that a wrong input is one clear line
before any device work, then runs the programs step after step. Metrics are fetched
one step behind: while the host writes step n, the device computes step n + 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import yaml

from jppo import programs, rewards, settings
from jppo.checkpoint import Checkpoints, identity
from jppo.config import Config, ConfigError, ModelConfig, Setup
from jppo.console import Progress
from jppo.data import PromptData, pad_token_id, read_rows, stop_token_ids
from jppo.metrics import MetricWriter, read_jsonl
from jppo.models import transformer
from jppo.models.gguf import gguf_tokenizer, load_gguf
from jppo.models.hf import load_hf
from jppo.models.tokenizer import load_tokenizer
from jppo.rewards import RewardFn
from jppo.state import init_state, init_trees
from jppo.steplog import StepLog
from jppo.types import Frozen, Params, TrainState


class Model(NamedTuple):
    """A model in memory: its shape, a whole param tree, and its tokenizer."""

    config: ModelConfig
    params: Params
    tokenizer: Any = None


class Result(NamedTuple):
    """What training leaves: the policy as a whole model, the state, the history."""

    policy: Model
    state: TrainState
    history: list[dict[str, float]]
    folder: Path


class Job(NamedTuple):
    """A run, checked and loaded, before its first step."""

    setup: Setup
    policy: Model
    prompts: PromptData
    reward_fn: RewardFn | None
    state: TrainState
    frozen: Frozen


def load_model(source: str | Path | Model, dtype: str = "float32") -> Model:
    """A model from a Hugging Face directory or a GGUF file, or itself if in memory."""
    if isinstance(source, Model):
        return source
    if str(source).endswith(".gguf"):
        return Model(*load_gguf(source, dtype=dtype), gguf_tokenizer(source))
    if not str(source):
        raise ConfigError("policy.path is not set: give a Hugging Face directory")
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


def make_setup(
    cfg: Config, policy: Model, reward: Model | None, prompt_tokens: int
) -> Setup:
    """Everything static about the programs. Raises ConfigError where roles clash."""
    actor = dataclasses.replace(
        policy.config,
        dtype=cfg.policy.dtype,
        remat=cfg.policy.remat,
        unroll=cfg.policy.unroll,
    )
    from_reward = cfg.critic.init == "reward"
    if from_reward and reward is None:
        raise ConfigError("critic.init=reward needs a reward model (reward.model)")
    if reward is not None and reward.config.vocab_size != actor.vocab_size:
        raise ConfigError(
            f"the reward model has {reward.config.vocab_size} token ids, the policy"
            f" {actor.vocab_size}: they must share a tokenizer"
        )
    like = {"dtype": actor.dtype, "remat": actor.remat, "unroll": actor.unroll}
    reward_cfg = reward and dataclasses.replace(reward.config, **like)
    critic = reward_cfg if from_reward else actor
    assert critic is not None
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
    )


def prepare(
    cfg: Config,
    *,
    policy: str | Path | Model | None = None,
    prompts: Sequence[str | dict[str, Any]] | None = None,
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
            raise ConfigError("data.prompts is not set: give a JSONL file of prompts")
        prompts = read_rows(cfg.data.prompts, (cfg.data.column,))
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


def train(
    config: Config | dict[str, Any] | None = None,
    *,
    policy: str | Path | Model | None = None,
    prompts: Sequence[str | dict[str, Any]] | None = None,
    reward_fn: RewardFn | None = None,
    reward_model: str | Path | Model | None = None,
    steps: int | None = None,
    yardsticks: Mapping[str, RewardFn] | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> Result:
    """Trains a policy with PPO; every argument but `config` overrides its setting.

    policy, reward_model: a Hugging Face directory or a `Model`. prompts: strings, or
    dicts whose other columns are passed on to `reward_fn(prompts, completions,
    **columns) -> list[float]`. yardsticks: functions of the same form that are logged
    and never trained on. A folder that already holds this run is continued from its
    last checkpoint. Raises ConfigError, DataError or RewardError with one line.
    """
    cfg = config if isinstance(config, Config) else settings.from_dict(config or {})
    if steps is not None:
        cfg = settings.from_dict({"run.steps": steps}, cfg)
    job = prepare(
        cfg,
        policy=policy,
        prompts=prompts,
        reward_fn=reward_fn,
        reward_model=reward_model,
    )
    return run(job, yardsticks=yardsticks, on_step=on_step)


def run(
    job: Job,
    progs: programs.Programs | None = None,
    *,
    yardsticks: Mapping[str, RewardFn] | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> Result:
    """Runs a prepared job to its last step, or from its last checkpoint on."""
    cfg, progs = job.setup.config, progs or programs.build(job.setup)
    folder = Path(cfg.run.folder)
    state, frozen = progs.place(job.state, job.frozen)
    who = identity(job.setup, job.frozen)
    store = Checkpoints(folder / "checkpoints", keep=cfg.run.keep)
    cursor = start = 0
    if store.latest() is not None and cfg.run.resume:
        state, meta = store.restore(state, who)
        cursor, start = meta["cursor"], int(state.step)
    elif store.latest() is not None:
        raise ConfigError(
            f"{folder} already holds a run: set run.resume=true or another run.folder"
        )
    b = cfg.ppo.batch_size
    with (
        contextlib.closing(store),
        MetricWriter(
            folder, resume_step=start or -1, tensorboard=cfg.run.tensorboard
        ) as writer,
        Progress(cfg.run.steps, title="PPO", quiet=cfg.run.quiet, done=start) as bar,
    ):
        _write_config(folder, cfg)
        log = StepLog(job, writer, bar, yardsticks or {}, on_step)
        try:
            for step in range(start + 1, cfg.run.steps + 1):
                indices = job.prompts.order(cursor, b)
                batch = progs.put(job.prompts.batch(indices))
                if cfg.run.fused:
                    state, metrics, rolled = progs.iteration(state, frozen, batch)
                else:
                    rolled = progs.generate(state, frozen, batch)
                    asked = job.reward_fn is not None
                    scores = (progs.put(log.scores(rolled, indices)),) if asked else ()
                    experience, metrics = progs.score(state, frozen, rolled, *scores)
                    state, metrics = progs.update(state, frozen, experience, metrics)
                cursor += b
                log.push(step, indices, metrics, rolled)
                every = cfg.run.checkpoint_every
                if step == cfg.run.steps or (every and step % every == 0):
                    log.flush()
                    store.save(state, {"cursor": cursor, "identity": who})
        except BaseException:
            # Hours of steps outlive a reward function that fails, and Ctrl-C.
            if not state.step.is_deleted() and int(state.step) > start:
                store.save(state, {"cursor": cursor, "identity": who})
            log.flush()
            raise
    whole = transformer.merge_params(frozen.actor_base, state.actor)
    model = Model(job.setup.actor, whole, job.policy.tokenizer)
    return Result(model, state, read_jsonl(folder / "metrics.jsonl"), folder)


def _write_config(folder: Path, cfg: Config) -> None:
    text = yaml.safe_dump(settings.to_dict(cfg), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
