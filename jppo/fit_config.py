"""Settings of the supervised runs: fine-tuning, reward models, DPO.

All three share the sections model, data, fit, optim, mesh and run; each has one of its
own for its loss.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jppo.checks import check_fit
from jppo.config import MeshConfig, OptimConfig, PolicyConfig
from jppo.model_config import opt


@dataclasses.dataclass(frozen=True)
class FitDataConfig:
    """Examples: JSONL, Parquet, or a folder of `datasets`."""

    train: str = opt("", "file or folder of examples to learn from")
    eval: str = opt("", "file or folder of held-out examples; empty = none")
    max_tokens: int = opt(1024, "token slots of a row")
    overlong: Literal["error", "drop"] = opt("error", "what to do with longer rows")
    shuffle: bool = opt(True, "a new order every pass")


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How long, and how much at a time."""

    batch_size: int = opt(64, "examples an optimizer step")
    micro_batches: int = opt(1, "gradient accumulation: parts of a batch")
    epochs: float = opt(1.0, "passes over the examples")
    steps: int = opt(0, "optimizer steps; 0 = as many as the epochs take")
    eval_every: int = opt(0, "steps between evaluations; 0 = only at the end")


@dataclasses.dataclass(frozen=True)
class FitRunConfig:
    """One run and its folder."""

    folder: str = opt("runs/fit", "everything that the run writes")
    seed: int = opt(0, "of fresh weights and data order")
    checkpoint_every: int = opt(200, "steps; 0 = only at the end")
    keep: int = opt(2, "checkpoints kept")
    resume: bool = opt(True, "go on from the folder's last checkpoint")
    export: bool = opt(True, "write the model to FOLDER/model at the end")
    tensorboard: bool = opt(True, "write TensorBoard events")
    quiet: bool = opt(False, "print nothing but errors")


@dataclasses.dataclass(frozen=True)
class TokenLossConfig:
    """Supervised fine-tuning."""

    packing: bool = opt(False, "several short examples share a row")
    head_chunk: int = opt(4096, "tokens of logits that exist at one time")


@dataclasses.dataclass(frozen=True)
class PairLossConfig:
    """A reward model from pairs (Bradley–Terry)."""

    margin: bool = opt(True, "use the pairs' margins, where they have any")
    center: float = opt(0.0, "weight of (r_chosen + r_rejected)²")
    normalize: bool = opt(
        False, "at the end, move the head's bias until chosen texts score 0 on average"
    )


@dataclasses.dataclass(frozen=True)
class DPOLossConfig:
    """Direct preference optimisation."""

    beta: float = opt(0.1, "β, the strength of the leash to the reference")
    kind: Literal["sigmoid", "ipo"] = opt("sigmoid", "the loss")
    label_smoothing: float = opt(0.0, "share of pairs that are the wrong way round")
    head_chunk: int = opt(4096, "tokens of logits that exist at one time")


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """A whole run of supervised fine-tuning (`jppo sft`)."""

    model: PolicyConfig = PolicyConfig()
    data: FitDataConfig = FitDataConfig()
    fit: FitConfig = FitConfig()
    sft: TokenLossConfig = TokenLossConfig()
    optim: OptimConfig = OptimConfig(lr=2e-5, schedule="cosine", warmup=10)
    mesh: MeshConfig = MeshConfig()
    run: FitRunConfig = FitRunConfig(folder="runs/sft")

    def __post_init__(self):
        check_fit(self)


@dataclasses.dataclass(frozen=True)
class RewardFitConfig:
    """A whole run that fits a reward model to pairs (`jppo reward`)."""

    model: PolicyConfig = PolicyConfig()
    data: FitDataConfig = FitDataConfig()
    fit: FitConfig = FitConfig()
    reward: PairLossConfig = PairLossConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5, schedule="cosine", warmup=10)
    mesh: MeshConfig = MeshConfig()
    run: FitRunConfig = FitRunConfig(folder="runs/reward")

    def __post_init__(self):
        check_fit(self)


@dataclasses.dataclass(frozen=True)
class DPOConfig:
    """A whole run of direct preference optimisation (`jppo dpo`)."""

    model: PolicyConfig = PolicyConfig()
    data: FitDataConfig = FitDataConfig()
    fit: FitConfig = FitConfig()
    dpo: DPOLossConfig = DPOLossConfig()
    optim: OptimConfig = OptimConfig(lr=5e-7, schedule="linear", warmup=10)
    mesh: MeshConfig = MeshConfig()
    run: FitRunConfig = FitRunConfig(folder="runs/dpo")

    def __post_init__(self):
        check_fit(self)


FitAny = SFTConfig | RewardFitConfig | DPOConfig
