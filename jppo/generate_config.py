"""Settings of text generation (`jppo generate`)."""

from __future__ import annotations

import dataclasses

from jppo.checks import ConfigError
from jppo.config import DataConfig, MeshConfig, PolicyConfig, SamplingConfig
from jppo.model_config import opt


@dataclasses.dataclass(frozen=True)
class GenerateRunConfig:
    """One pass over the prompts."""

    out: str = opt("", "file of JSON lines to write; empty = print the texts")
    batch_size: int = opt(8, "prompts at a time")
    samples: int = opt(1, "completions a prompt")
    seed: int = opt(0, "of sampling")
    quiet: bool = opt(False, "print nothing but texts and errors")


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Completions of prompts by a model."""

    prompt: str = opt("", "one prompt, in place of a file")
    model: PolicyConfig = PolicyConfig()
    data: DataConfig = DataConfig(shuffle=False)
    sampling: SamplingConfig = SamplingConfig()
    mesh: MeshConfig = MeshConfig()
    run: GenerateRunConfig = GenerateRunConfig()

    def __post_init__(self):
        for key in ("batch_size", "samples"):
            if (value := getattr(self.run, key)) < 1:
                raise ConfigError(f"run.{key} must be at least 1, got {value}")
        if self.sampling.max_new_tokens < 1:
            raise ConfigError(
                "sampling.max_new_tokens must be at least 1, got"
                f" {self.sampling.max_new_tokens}"
            )
        if self.sampling.temperature < 0:
            raise ConfigError(
                "sampling.temperature must not be negative, got"
                f" {self.sampling.temperature}"
            )
