"""Training: the only place with a clock, files and a progress bar.

`train` prepares everything on the host, then runs the programs step after step.
Metrics are fetched one step behind: while the host writes step n, the device computes
step n + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jppo import programs, rewards, settings
from jppo.checkpoint import identity
from jppo.config import Config
from jppo.data import PromptRow
from jppo.job import Job, prepare
from jppo.loading import Model
from jppo.metrics import read_jsonl
from jppo.rewards import RewardFn
from jppo.run_folder import RunFolder, write_adapter, write_model
from jppo.state import whole_critic, whole_policy
from jppo.steplog import StepLog, ended
from jppo.types import TrainState


class Result(NamedTuple):
    """What training leaves: policy and critic as whole models, the history."""

    policy: Model
    critic: Model
    state: TrainState
    history: list[dict[str, float]]
    folder: Path


def train(
    config: Config | dict[str, Any] | None = None,
    *,
    policy: str | Path | Model | None = None,
    prompts: Sequence[PromptRow] | None = None,
    reward_fn: RewardFn | None = None,
    reward_model: str | Path | Model | None = None,
    steps: int | None = None,
    yardsticks: Mapping[str, RewardFn] | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> Result:
    """Trains a policy with PPO; every argument but `config` overrides its setting.

    policy, reward_model: a Hugging Face directory or a `Model`. prompts: strings,
    lists of chat messages, or dicts whose other columns are passed on to
    `reward_fn(prompts, completions, **columns) -> list[float]`. yardsticks: functions
    of the same form that are logged and never trained on. A folder that already holds
    this run is continued from its last checkpoint. Raises ConfigError, DataError or
    RewardError with one line.
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
    for fn in (yardsticks or {}).values():
        rewards.check_columns(fn, job.prompts.names)
    cfg, progs = job.setup.config, progs or programs.build(job.setup)
    state, frozen = progs.place(job.state, job.frozen)
    folder = RunFolder(cfg, identity(job.setup, job.frozen))
    state, meta = folder.restore(state)
    cursor, b = meta.get("cursor", 0), cfg.ppo.batch_size
    with folder.opened(title="PPO", steps=cfg.run.steps) as (writer, bar):
        for note in job.notes:
            bar.note(note)
        log = StepLog(job, writer, bar, yardsticks or {}, on_step)
        try:
            for step in range(folder.start + 1, cfg.run.steps + 1):
                indices = job.prompts.order(cursor, b)
                batch = progs.put(job.prompts.batch(indices))
                if cfg.run.fused:
                    state, metrics, rolled = progs.iteration(state, frozen, batch)
                else:
                    rolled = progs.generate(state, frozen, batch)
                    rolled = ended(progs, job.policy.tokenizer, rolled)
                    asked = job.reward_fn is not None
                    scores = (progs.put(log.scores(rolled, indices)),) if asked else ()
                    experience, metrics = progs.score(state, frozen, rolled, *scores)
                    state, metrics = progs.update(state, frozen, experience, metrics)
                cursor += b
                log.push(step, indices, metrics, rolled)
                every = cfg.run.checkpoint_every
                if step == cfg.run.steps or (every and step % every == 0):
                    log.flush()
                    folder.save(state, cursor=cursor)
        except BaseException:
            folder.save_interrupted(state, cursor=cursor)
            log.flush()
            raise
        setup, tokenizer = job.setup, job.policy.tokenizer
        policy = Model(setup.actor, whole_policy(state, frozen), tokenizer)
        critic = Model(setup.critic, whole_critic(setup, state, frozen), tokenizer)
        if cfg.run.export:
            bar.phase("export")
            write_model(folder.path / "model", *policy)
            write_adapter(folder.path / "adapter", *policy, base=cfg.policy.path)
    history = read_jsonl(folder.path / "metrics.jsonl")
    return Result(policy, critic, state, history, folder.path)
