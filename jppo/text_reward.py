"""A reward model that reads texts: one whose tokenizer is not the policy's.

Responses are decoded, stripped of special tokens, and encoded anew as the reward
model's own training data was; then one jitted program scores them. To the loop this
is a reward function like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jppo.config import ConfigError
from jppo.examples import encode_example
from jppo.loading import Model
from jppo.models.transformer import as_frozen
from jppo.readers import DataError
from jppo.rollout import sequence_scores
from jppo.sharding import batch_sharding, replicated, tree_shardings
from jppo.tokens import pad


class TextReward:
    """reward_fn(prompts, completions) → scores, by a model with its own tokenizer.

    Rows are padded to `rows` and to a power of two of tokens, so few shapes compile.
    """

    __name__ = "reward model"
    timeout = None  # the first call compiles, which may take minutes

    def __init__(self, model: Model, mesh: jax.sharding.Mesh, rows: int):
        if model.tokenizer is None:
            raise ConfigError("the reward model has no tokenizer to read texts with")
        self.model, self.rows = model, rows
        params = as_frozen(model.params, model.config.dtype)
        placed = tree_shardings(params, mesh)
        self._params, self._mesh = jax.device_put(params, placed), mesh
        self._batch = batch_sharding(mesh)
        self._fn = jax.jit(
            lambda p, t, v: sequence_scores(model.config, p, t, v),
            in_shardings=(placed, self._batch, self._batch),
            out_shardings=replicated(mesh),
        )

    def encode(self, prompt: Any, completion: str, where: str = "row") -> list[int]:
        """Token ids of one text, with the end that the reward model was taught.

        Raises DataError where it is longer than the model's window.
        """
        row: dict[str, Any] = {"prompt": prompt, "completion": completion}
        if not isinstance(prompt, str):
            answer = {"role": "assistant", "content": completion}
            row = {"messages": [*prompt, answer]}
        elif not completion:
            row = {"text": prompt}
        ids = encode_example(self.model.tokenizer, row, where).ids
        room, most = self.model.config.max_positions, self.model.config.vocab_size
        if len(ids) > room:
            raise DataError(
                f"{where}: prompt and response are {len(ids)} tokens to the reward"
                f" model, which reads {room}"
            )
        if max(ids) >= most:
            raise DataError(f"{where}: token id {max(ids)}, the model has {most}")
        return ids

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **_: Any
    ) -> list[float]:
        """One score a completion; other columns are not read."""
        pairs = enumerate(zip(prompts, completions, strict=True))
        ids = [self.encode(p, c, f"sample {i}") for i, (p, c) in pairs]
        width = max(16, 1 << (max(map(len, ids)) - 1).bit_length())
        found: list[float] = []
        for start in range(0, len(ids), self.rows):
            part = ids[start : start + self.rows]
            full = part + [[0]] * (self.rows - len(part))
            tokens, valid = jax.device_put(pad(full, width, 0, left=False), self._batch)
            with jax.set_mesh(self._mesh):
                scores = np.asarray(self._fn(self._params, tokens, valid))
            found += scores[: len(part)].tolist()
        return found
