"""A policy on held-out prompts: one response each, its scores, and what it costs.

The same random key serves every policy that is compared, and the same compiled
programs that train also evaluate, so nothing is compiled twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jppo import rewards
from jppo.data import PromptData
from jppo.programs import Programs
from jppo.rewards import RewardFn
from jppo.steplog import completions, ended
from jppo.types import Frozen, TrainState


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One row a prompt; columns by name, each `[b]`."""

    prompts: list[str]
    completions: list[str]
    columns: dict[str, np.ndarray]

    def summary(self) -> dict[str, float]:
        """Mean and standard error of each column, and distinct-2 of all responses."""
        n = max(len(self.prompts), 1)
        means = {k: float(v.mean()) for k, v in self.columns.items()}
        errors = {f"{k}_se": float(v.std()) / n**0.5 for k, v in self.columns.items()}
        return means | errors | {"distinct_2": distinct(self.completions, 2)}

    def samples(self, limit: int) -> list[dict[str, Any]]:
        """The first rows, for people to read."""
        shown = zip(self.prompts, self.completions, strict=True)
        return [
            {"prompt": p, "completion": c}
            | {"score" if k == "reward" else k: float(v[i]) for k, v in self._texts()}
            for i, (p, c) in zip(range(limit), shown, strict=False)
        ]

    def _texts(self) -> list[tuple[str, np.ndarray]]:
        return [(k, v) for k, v in self.columns.items() if k not in ("kl", "length")]


def distinct(texts: Sequence[str], n: int) -> float:
    """Share of the n-grams of words that occur once or for the first time."""
    grams = [
        tuple(words[i : i + n])
        for words in (text.split() for text in texts)
        for i in range(len(words) - n + 1)
    ]
    return len(set(grams)) / max(len(grams), 1)


def evaluate(
    progs: Programs,
    state: TrainState,
    frozen: Frozen,
    prompts: PromptData,
    tokenizer: Any,
    *,
    reward_fn: RewardFn | None = None,
    yardsticks: Mapping[str, RewardFn] | None = None,
    seed: int = 0,
) -> Evaluation:
    """Samples one response a prompt. Columns: reward, kl, length, and the yardsticks.

    kl is the sum over tokens of log π − log π_ref at the sampled tokens, in nats.
    """
    state = dataclasses.replace(state, key=jax.random.key(seed))
    size = progs.setup.config.ppo.batch_size
    limit = progs.setup.config.reward.timeout

    def ask(fn, *asked):
        return rewards.call(fn, *asked, timeout=rewards.timeout_of(fn, limit))

    texts: list[str] = []
    parts: dict[str, list[np.ndarray]] = {"reward": [], "kl": [], "length": []}
    for indices, batch in prompts.batches(size):
        rolled = ended(
            progs, tokenizer, progs.generate(state, frozen, progs.put(batch))
        )
        found = completions(tokenizer, rolled)[: len(indices)]
        texts += found
        asked = [prompts.prompts(indices), found, prompts.columns(indices)]
        scores = ()
        if reward_fn is not None:
            values = np.zeros(size, np.float32)
            values[: len(indices)] = ask(reward_fn, *asked)
            scores = (progs.put(values),)
        experience, _ = progs.score(state, frozen, rolled, *scores)
        keep = (experience.mask, experience.logp_old, experience.logp_ref)
        mask, logp, logp_ref, got = jax.device_get((*keep, experience.scores))
        gap = np.where(mask, logp - logp_ref, 0.0)
        columns = {
            "reward": got,
            "kl": gap.sum(-1),
            "length": mask.sum(-1).astype(np.float32),
        }
        for name, fn in (yardsticks or {}).items():
            columns[name] = ask(fn, *asked)
        for name, column in columns.items():
            parts.setdefault(name, []).append(column[: len(indices)])
    columns = {name: np.concatenate(values) for name, values in parts.items()}
    return Evaluation(prompts.texts(range(len(prompts))), texts, columns)
