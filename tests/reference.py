"""PPO for language models in plain numpy loops: what the library must agree with."""

import math

import numpy as np


def shaped_rewards(cfg, logp, ref, scores, mask, stopped, beta):
    """−β k_t on every token, and the score on one slot of each row."""
    rewards = np.zeros(mask.shape)
    for b, length in enumerate(mask.sum(-1)):
        if length == 0:
            continue
        score = scores[b]
        if cfg.reward.clip is not None:
            score = min(max(score, -cfg.reward.clip), cfg.reward.clip)
        penalty = cfg.reward.missing_eos_penalty
        if penalty is not None and not stopped[b]:
            replaced = cfg.reward.missing_eos_mode == "replace"
            score = penalty if replaced else score - penalty
        for t in range(length):
            k1 = float(logp[b, t]) - float(ref[b, t])
            k3 = math.exp(-k1) - 1 + k1
            k = {"k1": k1, "k2": k1 * k1 / 2, "k3": k3}[cfg.kl.estimator]
            rewards[b, t] = -beta * k if cfg.kl.where == "reward" else 0.0
        rewards[b, score_slot(cfg, length, mask.shape[1])] += score
    if cfg.reward.whiten:
        slots = score_slots(cfg, mask)
        rewards = np.where(slots, scale(rewards, slots, keep_mean=True), 0.0)
    return rewards


def score_slot(cfg, length, t):
    after = cfg.reward.score_at == "after_eos"
    return min(length, t - 1) if after else length - 1


def score_slots(cfg, mask):
    """The mask, and the slot of the score where that lies outside."""
    slots = mask.copy()
    for b, length in enumerate(mask.sum(-1)):
        if length:
            slots[b, score_slot(cfg, length, mask.shape[1])] = True
    return slots


def scale(x, mask, *, keep_mean=False):
    mean, std = x[mask].mean(), math.sqrt(x[mask].var(ddof=1) + 1e-8)
    return np.where(mask, (x - mean) / std + (mean if keep_mean else 0.0), 0.0)


def gae(cfg, rewards, values, slots):
    """(advantages, returns) by the backward recursion over each row."""
    advantages = np.zeros(slots.shape)
    for b, length in enumerate(slots.sum(-1)):
        value, advantage = 0.0, 0.0
        for t in reversed(range(length)):
            delta = rewards[b, t] + cfg.ppo.gamma * value - values[b, t]
            advantage = delta + cfg.ppo.gamma * cfg.ppo.lam * advantage
            value, advantages[b, t] = values[b, t], advantage
    return advantages, np.where(slots, advantages + values, 0.0)


def experience(cfg, roles, sampler_logp, scores, mask, stopped, beta):
    """All numbers of a rollout, from each role's output, as a dict."""
    mask = np.asarray(mask)
    recomputed = cfg.ppo.logp_old == "recompute"
    old = np.asarray(roles["logp"] if recomputed else sampler_logp, float)
    ref, values = (np.asarray(roles[k], float) for k in ("logp_ref", "values"))
    rewards = shaped_rewards(cfg, old, ref, scores, mask, stopped, beta)
    slots = score_slots(cfg, mask)
    advantages, returns = gae(cfg, rewards, values, slots)
    rows = mask.any(-1)
    kl = np.where(mask, old - ref, 0.0)
    gap = np.abs(np.asarray(roles["logp"]) - np.asarray(sampler_logp))
    out = {
        "kl": kl.sum(-1)[rows].mean(),
        "kl_token": kl[mask].mean(),
        "scores": np.asarray(scores, float)[rows].mean(),
        "rewards": rewards.sum(-1)[rows].mean(),
        "entropy": np.asarray(roles["entropy"])[mask].mean(),
        "lengths": mask.sum(-1)[rows].mean(),
        "stopped_frac": np.asarray(stopped)[rows].mean(),
        "values": values[mask].mean(),
        "explained_variance": 1
        - (returns - values)[mask].var(ddof=1) / returns[mask].var(ddof=1),
        "sampler_gap_max": gap[mask].max(),
        "beta": beta,
        "sequences": rows.sum(),
        "tokens": mask.sum(),
    }
    weights = np.exp(np.asarray(roles["logp"], float) - np.asarray(sampler_logp, float))
    cap = cfg.ppo.tis_cap
    whitened = scale(advantages, mask) if cfg.ppo.whiten_advantages else advantages
    return out, {
        "logp_old": np.where(mask, old, 0.0),
        "logp_ref": np.where(mask, ref, 0.0),
        "advantages": np.where(mask, whitened, 0.0),
        "returns": returns,
        "weights": np.ones(mask.shape) if cap is None else np.minimum(weights, cap),
    }
