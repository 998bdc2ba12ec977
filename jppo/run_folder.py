"""The folder of a run: its settings, metrics and checkpoints, and where it goes on.

config.yaml  metrics.jsonl  samples.jsonl  tensorboard/  checkpoints/  model/
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from jppo import settings
from jppo.checkpoint import Checkpoints, State
from jppo.config import Config, ConfigError, ModelConfig
from jppo.console import Progress
from jppo.fit_config import DPOConfig, FitAny, RewardFitConfig, SFTConfig
from jppo.metrics import MetricWriter, read_jsonl
from jppo.models.hf import save_hf
from jppo.models.lora import split_adapter
from jppo.models.peft import save_adapter

KINDS = {"ppo": Config, "sft": SFTConfig, "dpo": DPOConfig, "reward": RewardFitConfig}
TITLES = {
    Config: "PPO",
    SFTConfig: "SFT",
    RewardFitConfig: "reward model",
    DPOConfig: "DPO",
}


def read_config(folder: str | Path) -> Config | FitAny:
    """The settings with which a run was last started.

    Raises ConfigError where the folder holds no run.
    """
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{folder}: no config.yaml, so not a run")
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        kind = next(cls for section, cls in KINDS.items() if section in tree)
    except (yaml.YAMLError, StopIteration, TypeError):
        raise ConfigError(f"{file}: not the settings of a run") from None
    return settings.from_dict(tree, kind())


class RunFolder:
    """One run on disk.

    folder = RunFolder(config, identity)
    state, meta = folder.restore(state)
    with folder.opened(title="PPO", steps=100) as (writer, bar):
        folder.save(state, cursor=64)
    """

    def __init__(self, cfg: Any, who: dict[str, Any]):
        """cfg: settings with a section `run`. who: whose checkpoints it takes."""
        self.cfg, self.who = cfg, who
        self.path = Path(cfg.run.folder)
        self.store = Checkpoints(self.path / "checkpoints", keep=cfg.run.keep)
        self.start = 0
        metrics = self.path / "metrics.jsonl"
        self._earlier = len(read_jsonl(metrics)) if metrics.is_file() else 0

    def restore(self, state: State) -> tuple[State, dict[str, Any]]:
        """(state, meta) of the last checkpoint, or `state` and {} in a new run.

        Raises ConfigError where there is one that must not be gone on from, and
        CheckpointError where it belongs to another model.
        """
        if self.store.latest() is None:
            return state, {}
        if not self.cfg.run.resume:
            raise ConfigError(
                f"{self.path} already holds a run: set run.resume=true or another"
                " run.folder"
            )
        state, meta = self.store.restore(state, self.who)
        self.start = int(state.step)
        return state, meta

    @contextlib.contextmanager
    def opened(
        self, *, title: str, steps: int, keys: Mapping[str, str] | None = None
    ) -> Iterator[tuple[MetricWriter, Progress]]:
        """The writer and the progress bar of the run, for as long as it lasts."""
        run = self.cfg.run
        shown = {} if keys is None else {"keys": keys}
        with (
            contextlib.closing(self.store),
            MetricWriter(
                self.path, resume_step=self.start or -1, tensorboard=run.tensorboard
            ) as writer,
            Progress(
                steps, title=title, quiet=run.quiet, done=self.start, **shown
            ) as bar,
        ):
            if self.start:
                bar.note(self._resumed(steps))
            elif self._earlier:
                bar.note(
                    f"{self.path} held {self._earlier} lines of metrics of a run that"
                    " left no checkpoint: begun anew"
                )
            self._write_config()
            yield writer, bar

    def save(self, state: State, **meta: Any) -> None:
        """A checkpoint of this state, with what else is needed to go on."""
        self.store.save(state, meta | {"identity": self.who})

    def save_interrupted(self, state: State, **meta: Any) -> None:
        """As `save`, after an exception: hours of steps outlive it, and Ctrl-C.

        Does nothing where the state was given away to a step that never ended, or
        where nothing is new.
        """
        if not state.step.is_deleted() and int(state.step) > self.start:
            self.save(state, **meta)

    def _resumed(self, steps: int) -> str:
        """One line: where a run goes on, and which settings it did not begin with."""
        text = (self.path / "config.yaml").read_text(encoding="utf-8")
        old = settings.flatten(yaml.safe_load(text))
        new = settings.flatten(settings.to_dict(self.cfg))
        changed = [f"{k} {old.get(k)} → {v}" for k, v in new.items() if old.get(k) != v]
        key = "run.steps" if "run.steps" in new else "fit.steps"
        end = "" if self.start < steps else f": nothing to do, raise {key} to train on"
        said = f"; changed settings: {', '.join(changed)}" if changed else ""
        return f"{self.path} is at step {self.start} of {steps}{end}{said}"

    def _write_config(self) -> None:
        tree = settings.to_dict(self.cfg)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        (self.path / "config.yaml").write_text(text, encoding="utf-8")


def write_model(
    folder: Path, cfg: ModelConfig, params: Any, tokenizer: Any, dtype: str = "float32"
) -> Path:
    """A Hugging Face directory in place of what was there; all of it or nothing.

    Adapters in the tree are merged into the weights.
    """
    return _replaced(
        folder, lambda new: save_hf(new, cfg, params, tokenizer, dtype=dtype)
    )


def write_adapter(
    folder: Path, cfg: ModelConfig, params: Any, tokenizer: Any, *, base: str
) -> Path | None:
    """The adapter of a tree in PEFT's format; None where the tree has none."""
    _, adapter = split_adapter(params)
    if not adapter:
        return None
    if "head" in params:
        adapter = adapter | {"head": params["head"]}
    return _replaced(
        folder,
        lambda new: save_adapter(new, cfg, adapter, base=base, tokenizer=tokenizer),
    )


def _replaced(folder: Path, write: Any) -> Path:
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    write(new)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    return folder
