"""Training: the only place with a clock, files and a progress bar.

`train` prepares everything on the host, then runs the programs step after step.
Metrics are fetched one step behind: while the host writes step n, the device computes
step n + 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jppo import programs, rewards, settings
from jppo.checkpoint import Checkpoints, identity
from jppo.config import Config, ConfigError
from jppo.console import Progress
from jppo.data import PromptRow
from jppo.job import Job, Model, prepare
from jppo.metrics import MetricWriter, read_jsonl
from jppo.models import transformer
from jppo.rewards import RewardFn
from jppo.steplog import StepLog, ended
from jppo.types import TrainState


class Result(NamedTuple):
    """What training leaves: the policy as a whole model, the state, the history."""

    policy: Model
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
        if job.prompts.dropped:
            bar.note(f"dropped {job.prompts.dropped} prompts that are too long")
        if start:
            bar.note(_resumed(folder, cfg, start))
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
                    store.save(state, {"cursor": cursor, "identity": who})
        except BaseException:
            # Hours of steps outlive a reward function that fails, and Ctrl-C.
            if not state.step.is_deleted() and int(state.step) > start:
                store.save(state, {"cursor": cursor, "identity": who})
            log.flush()
            raise
    whole = transformer.policy_params(frozen.actor_base, frozen.reference, state.actor)
    model = Model(job.setup.actor, whole, job.policy.tokenizer)
    return Result(model, state, read_jsonl(folder / "metrics.jsonl"), folder)


def _resumed(folder: Path, cfg: Config, start: int) -> str:
    """One line: where a run goes on, and which settings are not those it began with."""
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    old = settings.flatten(yaml.safe_load(text))
    new = settings.flatten(settings.to_dict(cfg))
    changed = [f"{k} {old.get(k)} → {v}" for k, v in new.items() if old.get(k) != v]
    end = (
        "" if start < cfg.run.steps else ": nothing to do, raise run.steps to train on"
    )
    said = f"; changed settings: {', '.join(changed)}" if changed else ""
    return f"{folder} is at step {start} of {cfg.run.steps}{end}{said}"


def _write_config(folder: Path, cfg: Config) -> None:
    text = yaml.safe_dump(settings.to_dict(cfg), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
