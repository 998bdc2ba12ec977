"""Relations between settings that types cannot say."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be: one line that names the key and what to do."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check(cfg: Any) -> None:
    """What a `Config` must satisfy. Raises ConfigError naming the keys."""
    ppo, kl = cfg.ppo, cfg.kl
    for key in ("batch_size", "epochs", "minibatches", "micro_batches", "head_chunk"):
        value = getattr(ppo, key)
        _require(value >= 1, f"ppo.{key} must be at least 1, got {value}")
    rows, parts = ppo.batch_size, ppo.minibatches * ppo.micro_batches
    _require(
        rows % parts == 0,
        f"ppo.batch_size {rows} does not divide into ppo.minibatches {ppo.minibatches}"
        f" × ppo.micro_batches {ppo.micro_batches} = {parts} equal parts",
    )
    _require(0 <= ppo.lam <= 1, f"ppo.lam must lie in [0, 1], got {ppo.lam}")
    _require(0 <= ppo.gamma <= 1, f"ppo.gamma must lie in [0, 1], got {ppo.gamma}")
    _require(0 < ppo.eps < 1, f"ppo.eps must lie in (0, 1), got {ppo.eps}")
    _require(kl.beta >= 0, f"kl.beta must not be negative, got {kl.beta}")
    _require(kl.target > 0, f"kl.target must be positive, got {kl.target}")
    s = cfg.sampling
    _require(
        s.max_new_tokens >= 1,
        f"sampling.max_new_tokens must be at least 1, got {s.max_new_tokens}",
    )
    _require(
        s.temperature > 0,
        f"sampling.temperature must be positive to train, got {s.temperature}:"
        " a greedy policy has no log-probs to compare",
    )
    _require(
        ppo.logp_old == "recompute" or (s.top_k == 0 and s.top_p >= 1 and s.min_p <= 0),
        "ppo.logp_old=sampler needs full-vocabulary sampling: unset sampling.top_k,"
        " top_p and min_p, or use ppo.logp_old=recompute",
    )
    _require(
        ppo.tis_cap is None or ppo.logp_old == "recompute",
        "ppo.tis_cap needs ppo.logp_old=recompute; with sampler it would correct twice",
    )
    unroll = cfg.policy.unroll
    _require(
        unroll is None or unroll >= 1,
        f"policy.unroll must be at least 1 or null, got {unroll}",
    )
    _check_lora("policy", cfg.policy.lora)
    _check_lora("critic", cfg.critic.lora)
    _require(cfg.run.steps >= 1, f"run.steps must be at least 1, got {cfg.run.steps}")
    _check_critic(cfg.critic, cfg.run.steps)
    _require(kl.horizon > 0, f"kl.horizon must be positive, got {kl.horizon}")
    _check_lr("actor_optim", cfg.actor_optim.lr)
    _check_lr("critic_optim", cfg.critic_optim.lr)
    _require(cfg.run.seed >= 0, f"run.seed must not be negative, got {cfg.run.seed}")


def _check_critic(critic: Any, steps: int) -> None:
    shared, fresh = critic.layout == "shared", critic.init == "scratch"
    _require(
        not shared or critic.init == "policy",
        f"critic.init={critic.init} needs critic.layout=separate: a shared critic is a"
        " head on the actor",
    )
    _require(
        not (shared and critic.lora.rank),
        "critic.lora.rank needs critic.layout=separate: a shared critic is a head",
    )
    _require(
        not fresh or (critic.train_layers is None and not critic.lora.rank),
        "critic.init=scratch needs critic.train_layers=null and critic.lora.rank=0:"
        " fresh weights must learn",
    )
    _require(
        0 <= critic.warmup < steps,
        f"critic.warmup is {critic.warmup}: it must lie between 0 and run.steps"
        f" {steps}, for the policy to learn at all",
    )


def _check_lora(name: str, lora: Any) -> None:
    ok = lora.rank >= 0 and lora.alpha > 0
    _require(ok, f"{name}.lora needs rank ≥ 0 and alpha > 0, got {lora}")


def _check_lr(name: str, lr: float) -> None:
    ok = 0 <= lr < float("inf")
    _require(ok, f"{name}.lr must not be negative, got {lr}")


def check_fit(cfg: Any) -> None:
    """What a supervised run's settings must satisfy. Raises ConfigError."""
    fit = cfg.fit
    for key in ("batch_size", "micro_batches"):
        value = getattr(fit, key)
        _require(value >= 1, f"fit.{key} must be at least 1, got {value}")
    _require(
        fit.batch_size % fit.micro_batches == 0,
        f"fit.batch_size {fit.batch_size} does not divide into fit.micro_batches"
        f" {fit.micro_batches} equal parts",
    )
    _require(fit.epochs > 0, f"fit.epochs must be positive, got {fit.epochs}")
    _require(fit.steps >= 0, f"fit.steps must not be negative, got {fit.steps}")
    _require(
        cfg.data.max_tokens >= 2,
        f"data.max_tokens must be at least 2, got {cfg.data.max_tokens}",
    )
    _check_lora("model", cfg.model.lora)
    _check_lr("optim", cfg.optim.lr)
    dpo = getattr(cfg, "dpo", None)
    if dpo is not None:
        _require(dpo.beta > 0, f"dpo.beta must be positive, got {dpo.beta}")
        ok = 0 <= dpo.label_smoothing < 0.5
        _require(
            ok, f"dpo.label_smoothing must lie in [0, 0.5), got {dpo.label_smoothing}"
        )
    reward = getattr(cfg, "reward", None)
    if reward is not None:
        _require(
            reward.center >= 0, f"reward.center must not be negative: {reward.center}"
        )
