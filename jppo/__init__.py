"""jppo: exact, functional PPO for language models in JAX.

Pure functions are imported here; what touches files, devices or a clock is loaded
when it is first used, so that `import jppo` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jppo.advantages import (
    discounted_returns,
    gae_scan,
    grpo_advantages,
    length_adaptive_lam,
    nstep_returns,
    reinforce_pp_advantages,
    rloo_advantages,
)
from jppo.config import (
    Config,
    ConfigError,
    ModelConfig,
    RewardTrainConfig,
    Setup,
)
from jppo.fit_config import DPOConfig, RewardFitConfig, SFTConfig
from jppo.kl import (
    KLState,
    adaptive_kl,
    fixed_kl,
    full_kl,
    kl_estimate,
    kl_penalty,
    missing_eos,
    overlong_penalty,
    paper_kl,
    place_scores,
    score_mask,
)
from jppo.logprobs import chunked_logprobs, entropy, head_logits, token_logprobs
from jppo.losses import (
    bradley_terry,
    clip_loss,
    entropy_bonus,
    explained_variance,
    kl_loss,
    tis_weights,
    value_loss,
)
from jppo.masked import aggregate, masked_mean, masked_sum, masked_var, whiten
from jppo.settings import from_dict
from jppo.sharding import make_mesh

if TYPE_CHECKING:
    from jppo import programs
    from jppo.decode import generate
    from jppo.fit_loop import FitResult, fit
    from jppo.loading import Model, load_model
    from jppo.loop import Result, train
    from jppo.models.gguf import convert_gguf, load_gguf
    from jppo.models.hf import load_hf, save_hf
    from jppo.models.tokenizer import load_tokenizer
    from jppo.ppo import train_step
    from jppo.report import write_report
    from jppo.reward_loop import Pairs, Ratings, score_texts, train_reward

_LAZY = {
    "FitResult": "fit_loop",
    "Model": "loading",
    "Result": "loop",
    "fit": "fit_loop",
    "load_model": "loading",
    "train": "loop",
    "Pairs": "reward_loop",
    "Ratings": "reward_loop",
    "score_texts": "reward_loop",
    "train_reward": "reward_loop",
    "convert_gguf": "models.gguf",
    "load_gguf": "models.gguf",
    "load_hf": "models.hf",
    "save_hf": "models.hf",
    "load_tokenizer": "models.tokenizer",
    "generate": "decode",
    "train_step": "ppo",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name == "programs":
        return importlib.import_module("jppo.programs")
    if name in _LAZY:
        return getattr(importlib.import_module(f"jppo.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'jppo' has no attribute {name!r}")


__all__ = [
    "Config",
    "ConfigError",
    "DPOConfig",
    "FitResult",
    "KLState",
    "Model",
    "ModelConfig",
    "Pairs",
    "Ratings",
    "Result",
    "RewardFitConfig",
    "RewardTrainConfig",
    "SFTConfig",
    "Setup",
    "adaptive_kl",
    "aggregate",
    "bradley_terry",
    "chunked_logprobs",
    "clip_loss",
    "convert_gguf",
    "discounted_returns",
    "entropy",
    "entropy_bonus",
    "explained_variance",
    "fit",
    "fixed_kl",
    "from_dict",
    "full_kl",
    "gae_scan",
    "generate",
    "grpo_advantages",
    "head_logits",
    "kl_estimate",
    "kl_loss",
    "kl_penalty",
    "length_adaptive_lam",
    "load_gguf",
    "load_hf",
    "load_model",
    "load_tokenizer",
    "make_mesh",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "missing_eos",
    "nstep_returns",
    "overlong_penalty",
    "paper_kl",
    "place_scores",
    "programs",
    "reinforce_pp_advantages",
    "rloo_advantages",
    "save_hf",
    "score_mask",
    "score_texts",
    "tis_weights",
    "token_logprobs",
    "train",
    "train_reward",
    "train_step",
    "value_loss",
    "whiten",
    "write_report",
]
