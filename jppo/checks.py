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
    _require(
        not (cfg.critic.layout == "shared" and cfg.critic.init == "reward"),
        "critic.init=reward needs critic.layout=separate: a shared critic is a head on"
        " the actor",
    )
    unroll = cfg.policy.unroll
    _require(
        unroll is None or unroll >= 1,
        f"policy.unroll must be at least 1 or null, got {unroll}",
    )
    for name, lora in (("policy", cfg.policy.lora), ("critic", cfg.critic.lora)):
        ok = lora.rank >= 0 and lora.alpha > 0
        _require(ok, f"{name}.lora needs rank ≥ 0 and alpha > 0, got {lora}")
    _require(
        not (cfg.critic.layout == "shared" and cfg.critic.lora.rank),
        "critic.lora.rank needs critic.layout=separate: a shared critic is a head",
    )
    _require(kl.horizon > 0, f"kl.horizon must be positive, got {kl.horizon}")
    for name, optim in (("actor", cfg.actor_optim), ("critic", cfg.critic_optim)):
        ok = 0 <= optim.lr < float("inf")
        _require(ok, f"{name}_optim.lr must not be negative, got {optim.lr}")
    _require(cfg.run.seed >= 0, f"run.seed must not be negative, got {cfg.run.seed}")
    _require(cfg.run.steps >= 1, f"run.steps must be at least 1, got {cfg.run.steps}")
