"""Every setting of a run, as frozen dataclasses: a value, hashable and comparable.

A field is a line with its default and what `--help` says of it; relations between
fields are in `checks.py`. Text becomes a Config in `settings.from_dict`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jppo.checks import ConfigError as ConfigError
from jppo.checks import check
from jppo.model_config import ModelConfig, opt

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) instead of trained weights."""

    rank: int = opt(0, "rank of the factors; 0 = no adapter, the weights learn")
    alpha: float = opt(16.0, "α: the adapter counts α/rank")
    targets: str = opt("attn/|mlp/", "regex on paths like blocks/attn/q")

    @property
    def scale(self) -> float:
        """Factor of A · B."""
        return self.alpha / self.rank if self.rank else 1.0


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """The actor, and so the reference: which weights, which of them learn."""

    path: str = opt("", "Hugging Face directory or .gguf file of the policy")
    train_layers: int | None = opt(
        None, "learn only the top n blocks and the final norm; null = every weight"
    )
    lora: LoraConfig = LoraConfig()
    dtype: Literal["float32", "bfloat16"] = opt("float32", "compute dtype")
    remat: bool = opt(False, "recompute blocks in the backward pass, saves memory")
    unroll: int | None = opt(
        None, "blocks unrolled per step of the scan over layers; null = all of up to 4"
    )


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value function."""

    layout: Literal["separate", "shared"] = opt(
        "separate", "a model of its own, or a head on the actor's last hidden state"
    )
    init: Literal["reward", "policy", "scratch"] = opt(
        "policy", "start from the reward model's weights, the policy's, or fresh ones"
    )
    warmup: int = opt(
        0, "iterations in which only the critic learns, and the policy stays"
    )
    train_layers: int | None = opt(
        None, "learn only the top n blocks, norm and head; null = every weight"
    )
    lora: LoraConfig = LoraConfig()


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Where scores come from, and what happens to them."""

    model: str = opt("", "directory of a reward model; empty = a Python function")
    function: str = opt("", "Python reward as 'package.module:function' or 'file.py:f'")
    timeout: float = opt(60.0, "seconds a Python reward function may take a batch")
    missing_eos_penalty: float | None = opt(
        None, "score of a response without a stop token (null: leave the score)"
    )
    missing_eos_mode: Literal["replace", "subtract"] = opt(
        "replace", "the penalty replaces the score, or is subtracted from it"
    )
    score_at: Literal["last", "after_eos"] = opt(
        "last", "slot of the score: the last valid token, or the one after (TRL)"
    )
    whiten: bool = opt(False, "scale shaped rewards to unit variance (mean kept)")
    clip: float | None = opt(None, "clip scores to ±clip")


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn; temperature also divides every scored logit."""

    max_new_tokens: int = opt(64, "response slots, in tokens")
    temperature: float = opt(1.0, "divides the logits everywhere; 0 = greedy decoding")
    top_k: int = opt(0, "keep the k likeliest tokens; 0 = all (sampling only)")
    top_p: float = opt(1.0, "keep the smallest set of probability p (sampling only)")
    min_p: float = opt(0.0, "drop tokens below min_p × the likeliest (sampling only)")
    stop: tuple[str, ...] = opt(
        (),
        "texts that end a response, besides EOS: one token on the device; several are"
        " looked for on the host, and what comes after is dropped (not run.fused)",
    )


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """One PPO iteration: arXiv 1707.06347, with the choices of arXiv 2403.17031."""

    batch_size: int = opt(64, "sequences a rollout")
    epochs: int = opt(4, "passes over one rollout")
    minibatches: int = opt(1, "optimizer steps an epoch")
    micro_batches: int = opt(1, "gradient accumulation: parts of a minibatch")
    eps: float = opt(0.2, "clip range ε of the ratio")
    eps_high: float | None = opt(None, "upper clip range, where it differs (DAPO)")
    dual_clip: float | None = opt(None, "bound c of the loss where A < 0 (dual clip)")
    value_eps: float | None = opt(0.2, "clip range of the values; null = no clipping")
    value_coef: float = opt(0.5, "c₁, weight of the value loss")
    entropy_coef: float = opt(0.0, "c₂, weight of the entropy bonus")
    gamma: float = opt(1.0, "discount γ")
    lam: float = opt(0.95, "λ of generalised advantage estimation")
    whiten_advantages: bool = opt(True, "normalise advantages over the global batch")
    aggregation: Aggregation = opt("token-mean", "how token losses become one number")
    logp_old: Literal["recompute", "sampler"] = opt(
        "recompute", "old log-probs from the training forward or from the decoder"
    )
    tis_cap: float | None = opt(None, "cap C of sampler-mismatch weights; null = off")
    head_chunk: int = opt(4096, "tokens of logits that exist at one time")


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """The leash to the reference policy."""

    beta: float = opt(0.05, "KL coefficient β (its start, where it adapts)")
    estimator: Literal["k1", "k2", "k3"] = opt("k1", "per-token estimator")
    where: Literal["reward", "loss"] = opt("reward", "in the reward, or in the loss")
    controller: Literal["fixed", "paper", "ziegler"] = opt("fixed", "how β moves")
    target: float = opt(6.0, "KL per sequence, in nats, that a controller steers to")
    horizon: float = opt(10000.0, "episodes over which Ziegler's controller moves β")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with a schedule; a non-finite step is skipped and counted."""

    lr: float = opt(1e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = opt("constant", "decay to 0")
    warmup: int = opt(0, "optimizer steps of linear warm-up")
    b1: float = opt(0.9, "Adam β₁")
    b2: float = opt(0.999, "Adam β₂")
    eps: float = opt(1e-5, "Adam ε (arXiv 2403.17031 uses 1e-5)")
    weight_decay: float = opt(0.0, "decoupled weight decay")
    max_grad_norm: float = opt(1.0, "clip by global norm; 0 = off")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one may be −1, 'all the devices that remain'."""

    slice: int = opt(1, "pod slices, across the data-centre network")
    data: int = opt(1, "batch cut, weights whole")
    fsdp: int = opt(-1, "batch and weights cut")
    tensor: int = opt(1, "heads and hidden features cut")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts."""

    prompts: str = opt("", "prompts: JSON lines, Parquet, or a saved `datasets` folder")
    column: str = opt("prompt", "its column with the prompt, text or chat messages")
    max_prompt_tokens: int = opt(0, "prompt slots; 0 = the longest prompt")
    overlong: Literal["error", "drop"] = opt("error", "what to do with longer prompts")
    shuffle: bool = opt(True, "a new order every pass")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run and its folder."""

    folder: str = opt("runs/ppo", "everything that the run writes")
    steps: int = opt(100, "PPO iterations")
    seed: int = opt(0, "of weights, data order and sampling")
    checkpoint_every: int = opt(50, "iterations; 0 = only at the end")
    keep: int = opt(2, "checkpoints kept")
    resume: bool = opt(True, "go on from the folder's last checkpoint")
    samples_every: int = opt(10, "iterations between logged samples; 0 = never")
    tensorboard: bool = opt(True, "write TensorBoard events")
    fused: bool = opt(False, "one program an iteration (reward model only)")
    export: bool = opt(True, "write the policy to FOLDER/model at the end")
    quiet: bool = opt(False, "print nothing but errors")


@dataclasses.dataclass(frozen=True)
class RewardTrainConfig:
    """A reward model from comparisons (`jppo.train_reward`)."""

    layers: int | None = opt(None, "keep the first n blocks of the base; null = all")
    train_layers: int | None = opt(
        None, "learn only the top n blocks, norm and head; null = every weight"
    )
    max_tokens: int = opt(512, "longer texts are an error")
    batch_size: int = opt(64, "texts a step; every known pair among them counts")
    epochs: int = opt(1, "passes over the texts")
    reads: int = opt(0, "earlier positions of each text that are scored as well")
    first_read: int = opt(8, "the earliest such position, in tokens")
    seed: int = opt(0, "of the head, the order and the reads")
    optim: OptimConfig = OptimConfig(lr=1e-5, schedule="cosine")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole PPO run."""

    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    ppo: PPOConfig = PPOConfig()
    kl: KLConfig = KLConfig()
    actor_optim: OptimConfig = OptimConfig()
    critic_optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that is static about the programs of one run: hashable, so a jit key."""

    config: Config
    actor: ModelConfig
    critic: ModelConfig
    reward: ModelConfig | None  # None: scores come from Python
    prompt_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    actor_frozen: int | None = None  # blocks below the trained ones; None: no trunk
    critic_frozen: int | None = None
    reward_on_critic_base: bool = False
    reward_lora: LoraConfig = LoraConfig()  # of a reward model that is an adapter
    stop_strings: tuple[str, ...] = ()  # of several tokens: the host cuts there
