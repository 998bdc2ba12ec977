"""What a step leaves behind: metrics, yardsticks, samples, written one step late.

While the host writes step n, the device computes step n + 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jppo import rewards
from jppo.config import ConfigError
from jppo.programs import Programs
from jppo.rewards import RewardFn
from jppo.tokens import trim_rollout
from jppo.types import Rollout


def completions(tokenizer: Any, rollout: Rollout) -> list[str]:
    """Text of each response, without special tokens. Waits for the device."""
    tokens, mask = jax.device_get((rollout.tokens, rollout.mask))
    tokens = tokens[:, -mask.shape[1] :]
    rows = [row[keep] for row, keep in zip(tokens, mask, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def ended(progs: Programs, tokenizer: Any, rollout: Rollout) -> Rollout:
    """The rollout, cut at stop strings where some are set, back on the device."""
    setup = progs.setup
    if not setup.stop_strings:
        return rollout
    return progs.put(
        trim_rollout(
            tokenizer,
            rollout,
            setup.stop_strings,
            stop_ids=setup.stop_ids,
            pad_id=setup.pad_id,
        )
    )


class StepLog:
    """Writes each step when the next one is already on the device."""

    def __init__(self, job, writer, bar, yardsticks, on_step):
        self.job, self.writer, self.bar = job, writer, bar
        self.yardsticks, self.on_step = yardsticks, on_step
        self._pending: tuple | None = None
        self._clock = time.monotonic()

    def scores(self, rolled: Rollout, indices: Sequence[int]) -> np.ndarray:
        """Scores of the Python reward function, checked."""
        return self._ask(self.job.reward_fn, rolled, indices)

    def _ask(self, fn: RewardFn, rolled: Rollout, indices: Sequence[int]) -> np.ndarray:
        data = self.job.prompts
        return rewards.call(
            fn,
            data.prompts(indices),
            completions(self.job.policy.tokenizer, rolled),
            data.columns(indices),
            timeout=rewards.timeout_of(fn, self.job.setup.config.reward.timeout),
        )

    def push(self, step: int, indices: Sequence[int], metrics: Any, rolled: Rollout):
        """Takes a step that was just dispatched, and writes the one before it."""
        done, self._pending = self._pending, (step, indices, metrics, rolled)
        self._finish(done)

    def flush(self) -> None:
        """Waits for the pending step, if any, and writes it."""
        done, self._pending = self._pending, None
        self._finish(done)

    def _finish(self, done: tuple | None) -> None:
        if done is None:
            return
        step, indices, metrics, rolled = done
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        try:
            for name, fn in self.yardsticks.items():
                if name in values or name in ("step", "seconds", "tokens_per_second"):
                    raise ConfigError(f"yardstick {name!r} has the name of a metric")
                values[name] = float(self._ask(fn, rolled, indices).mean())
        finally:  # a yardstick that fails does not cost the step's metrics
            self._write(step, values, indices, rolled)

    def _write(
        self,
        step: int,
        values: dict[str, float],
        indices: Sequence[int],
        rolled: Rollout,
    ) -> None:
        now = time.monotonic()
        values["seconds"], self._clock = now - self._clock, now
        values["tokens_per_second"] = values["tokens"] / values["seconds"]
        self.writer.write(step, values)
        self.bar.step(step, values)
        if values["kl"] < -1:
            self.bar.note(
                f"step {step}: mean sequence KL is {values['kl']:.2f}. A KL far below 0"
                " means that the sampler does not draw from the policy that is scored"
                " (top-k, top-p or a suppressed token), and it is being rewarded"
            )
        every = self.job.setup.config.run.samples_every
        if every and (step == 1 or step % every == 0):
            texts = completions(self.job.policy.tokenizer, rolled)[:4]
            shown = zip(self.job.prompts.texts(indices), texts, strict=False)
            rows = [{"prompt": p, "completion": c} for p, c in shown]
            self.writer.samples(step, rows)
        if self.on_step is not None:
            self.on_step(step, values)
