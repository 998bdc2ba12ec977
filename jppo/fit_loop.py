"""Fitting one model from files to files: fine-tuning, reward models, DPO.

`fit` prepares on the host, runs step after step, and leaves a folder from which the
same call goes on. Metrics are fetched one step behind, as in `loop.py`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo import settings
from jppo.checkpoint import fit_identity
from jppo.config import ConfigError
from jppo.console import Progress
from jppo.fit_config import DPOConfig, FitAny, RewardFitConfig, SFTConfig
from jppo.fit_data import Source
from jppo.fit_job import FitJob, prepare_fit, whole_params
from jppo.fit_steps import evaluate_fit, fit_steps
from jppo.fitting import Fit, build_fit
from jppo.loading import Model
from jppo.metrics import MetricWriter, read_jsonl
from jppo.order import RowOrder
from jppo.preference import ranked_scores
from jppo.run_folder import TITLES, RunFolder, write_adapter, write_model
from jppo.state import make_schedule
from jppo.types import FitFrozen, FitState

SHOWN = {
    "loss": "loss",
    "eval_loss": "held out",
    "pair_accuracy": "pairs right",
    "reward_margin": "margin",
    "lr": "lr",
    "seconds": "s/step",
}
BINS = 10  # of the calibration plot


class FitResult(NamedTuple):
    """What a fit leaves: the model (an adapter beside its weights), the history."""

    model: Model
    state: FitState
    history: list[dict[str, float]]
    folder: Path


def fit(
    config: FitAny,
    *,
    model: str | Path | Model | None = None,
    rows: Sequence[Any] | None = None,
    held_out: Sequence[Any] | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> FitResult:
    """Fits a model: an `SFTConfig`, `RewardFitConfig` or `DPOConfig` says to what.

    model, rows, held_out take the place of model.path, data.train and data.eval. A
    folder that already holds this run is continued from its last checkpoint. Raises
    ConfigError or DataError with one line.
    """
    if not isinstance(config, SFTConfig | RewardFitConfig | DPOConfig):
        raise ConfigError(
            "config must be an SFTConfig, RewardFitConfig or DPOConfig, got"
            f" {type(config).__name__}"
        )
    config = settings.from_dict({}, config)  # checks the types of a hand-built one
    return run_fit(
        prepare_fit(config, model=model, rows=rows, held_out=held_out), on_step=on_step
    )


def run_fit(
    job: FitJob, *, on_step: Callable[[int, dict[str, float]], None] | None = None
) -> FitResult:
    """Runs a prepared fit to its last step, or from its last checkpoint on."""
    cfg, ranks = job.config, isinstance(job.config, RewardFitConfig)
    scores = partial(ranked_scores, job.start.cfg) if ranks else None
    run = build_fit(
        job.objective, job.tx, job.mesh, job.state, job.start.frozen, scores=scores
    )
    kind = TITLES[type(cfg)]
    who = fit_identity(kind, job.start.cfg, job.state, job.start.frozen)
    state, frozen = run.place(job.state, job.start.frozen)
    folder = RunFolder(cfg, who)
    state, _ = folder.restore(state)
    order = RowOrder(len(job.data), seed=cfg.run.seed, shuffle=cfg.data.shuffle)
    with folder.opened(title=kind, steps=job.steps, keys=SHOWN) as (writer, bar):
        log = FitLog(job, run, writer, bar, on_step, folder.start)
        log.begin(state, frozen)
        try:
            steps = fit_steps(
                run,
                state,
                frozen,
                job.data,
                order,
                rows=cfg.fit.batch_size,
                steps=job.steps,
                parts=cfg.fit.micro_batches,
                start=folder.start,
            )
            for step, state, metrics in steps:  # noqa: B007, the last state is used
                log.push(step, metrics, state, frozen)
                every = cfg.run.checkpoint_every
                if every and step % every == 0 and step < job.steps:
                    folder.save(state)
            bar.phase("finish")
            state, summary = finish(job, run, state, frozen, folder.path)
            folder.save(state)
        except BaseException:
            folder.save_interrupted(state)
            raise
        text = json.dumps(summary, indent=2, ensure_ascii=False)
        (folder.path / "summary.json").write_text(text + "\n", encoding="utf-8")
        whole = whole_params(frozen, state.params)
        model = Model(job.start.cfg, whole, job.tokenizer)
        if cfg.run.export:
            export_fit(model, cfg, folder.path)
    return FitResult(
        model, state, read_jsonl(folder.path / "metrics.jsonl"), folder.path
    )


def export_fit(model: Model, cfg: FitAny, folder: Path) -> None:
    """`model/`, with an adapter merged in, and `adapter/` where there is one."""
    write_model(folder / "model", *model)
    write_adapter(folder / "adapter", *model, base=cfg.model.path)


# Metrics


class FitLog:
    """Waits for each step, judges held-out rows where they are due, and writes both."""

    def __init__(
        self,
        job: FitJob,
        run: Fit,
        writer: MetricWriter,
        bar: Progress,
        on_step: Callable[[int, dict[str, float]], None] | None,
        start: int,
    ):
        self.job, self.run, self.writer, self.bar = job, run, writer, bar
        self.on_step = on_step
        self._schedule = make_schedule(job.config.optim, job.steps)
        rows = read_jsonl(writer.folder / "metrics.jsonl") if start else []
        self._skipped = sum(row.get("skipped") or 0 for row in rows)
        self._start, self._clock = start, time.monotonic()

    def begin(self, state: FitState, frozen: FitFrozen) -> None:
        """Says what is to come, and judges the model before its first step."""
        job, fit = self.job, self.job.config.fit
        if job.dropped:
            self.bar.note(f"dropped {job.dropped} rows that are too long")
        learns = sum(x.size for x in jax.tree.leaves(state.params))
        still = sum(x.size for x in jax.tree.leaves(frozen.base))
        self.bar.note(
            f"{len(job.data)} rows, {job.steps} steps of {fit.batch_size} ="
            f" {job.steps * fit.batch_size / len(job.data):.2f} epochs;"
            f" {learns / 1e6:.1f} M weights learn"
            + (f" on a frozen trunk of {still / 1e6:.1f} M" if still else "")
        )
        if job.held_out is not None and not self._start:
            self.bar.phase("held-out rows")
            self.writer.write(0, self._judged(state, frozen))
            self._clock = time.monotonic()

    def _judged(self, state: FitState, frozen: FitFrozen) -> dict[str, float]:
        assert self.job.held_out is not None
        size = self.job.config.fit.batch_size // self.job.config.fit.micro_batches
        found = evaluate_fit(self.run, state, frozen, self.job.held_out, size)
        return {f"eval_{k}": v for k, v in found.items()}

    def push(self, step: int, metrics: Any, state: FitState, frozen: FitFrozen) -> None:
        """Writes a step that was just dispatched, when it is done."""
        fit = self.job.config.fit
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        # The schedule counts the steps that were taken, as the optimizer does.
        values["lr"] = float(np.asarray(self._schedule(step - 1 - self._skipped)))
        self._skipped += values["skipped"]
        values["epoch"] = step * fit.batch_size / len(self.job.data)
        values["seconds"] = time.monotonic() - self._clock
        due = step == self.job.steps or (fit.eval_every and step % fit.eval_every == 0)
        if self.job.held_out is not None and due:
            values |= self._judged(state, frozen)
        self._clock = time.monotonic()
        self.writer.write(step, values)
        self.bar.step(step, values)
        if self.on_step is not None:
            self.on_step(step, values)


# After the last step


def finish(
    job: FitJob, run: Fit, state: FitState, frozen: FitFrozen, folder: Path
) -> tuple[FitState, dict[str, Any]]:
    """The state to export, and the summary: held-out metrics first and last.

    A reward model is normalised here where that is asked for, and its calibration is
    measured: how often the text that it likes better is the chosen one.
    """
    history = read_jsonl(folder / "metrics.jsonl")
    judged = [
        {k.removeprefix("eval_"): v for k, v in row.items() if k.startswith("eval_")}
        for row in history
    ]
    judged = [row for row in judged if row]
    summary: dict[str, Any] = {}
    if judged:
        summary = {"before": judged[0], "after": judged[-1]}
    if not isinstance(job.config, RewardFitConfig):
        return state, summary
    if job.config.reward.normalize:
        chosen, _ = pair_scores(job, run, state, frozen, job.data)
        head = state.params["head"]
        moved = head | {"bias": head["bias"] - jnp.float32(chosen.mean())}
        params = state.params | {"head": moved}
        state = dataclasses.replace(state, params=params)
        summary["bias"] = float(moved["bias"][0])
    if job.held_out is not None:
        chosen, rejected = pair_scores(job, run, state, frozen, job.held_out)
        summary["chosen_score"] = float(chosen.mean())
        summary["rejected_score"] = float(rejected.mean())
        summary["calibration"] = calibration(chosen - rejected)
    return state, summary


def pair_scores(
    job: FitJob, run: Fit, state: FitState, frozen: FitFrozen, source: Source
) -> tuple[np.ndarray, np.ndarray]:
    """(scores of the chosen texts, of the rejected ones), in the order of the rows."""
    assert run.scores is not None
    size = job.config.fit.batch_size // job.config.fit.micro_batches
    found = []
    for start in range(0, len(source), size):
        rows = range(start, min(start + size, len(source)))
        batch = run.put(source.batch(rows, size, 0), parts=False)
        scores = np.asarray(run.scores(state.params, frozen, batch))[:, 0]
        found.append(scores[: 2 * len(rows)].reshape(-1, 2))
    both = np.concatenate(found)
    return both[:, 0], both[:, 1]


def calibration(gaps: np.ndarray) -> list[dict[str, float]]:
    """How sure a reward model is, and how often right, from r_chosen − r_rejected.

    Pairs in BINS groups of equal size by confidence σ(|gap|): mean confidence, share
    of pairs in the right order, and their number (arXiv 2403.17031 §4).
    """
    sure = np.abs(gaps)
    right = (gaps > 0) + 0.5 * (gaps == 0)
    groups = np.array_split(np.argsort(sure, kind="stable"), min(BINS, len(gaps)))
    return [
        {
            "confidence": float((1 / (1 + np.exp(-sure[g]))).mean()),
            "accuracy": float(right[g].mean()),
            "pairs": len(g),
        }
        for g in groups
    ]
