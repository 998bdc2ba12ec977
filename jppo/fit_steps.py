"""Steps of a fit, one after another, and sums over held-out rows. No files here."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jppo.fit_data import Source
from jppo.fitting import Fit
from jppo.order import RowOrder
from jppo.types import FitFrozen, FitState


def fit_steps(
    run: Fit,
    state: FitState,
    frozen: FitFrozen,
    source: Source,
    order: RowOrder,
    *,
    rows: int,
    steps: int,
    parts: int = 1,
    start: int = 0,
) -> Iterator[tuple[int, FitState, dict[str, jax.Array]]]:
    """(step, state, metrics) of steps start + 1 … steps, each `rows` rows of `source`.

    What is drawn depends on the number of the step alone, so a run that stopped goes
    on as if it had not. The state that came before is gone (donated).
    """
    size = rows // parts
    for step in range(start + 1, steps + 1):
        chosen = order.rows((step - 1) * rows, rows)
        batches = [
            source.batch(chosen[i * size : (i + 1) * size], size, step)
            for i in range(parts)
        ]
        batch = jax.tree.map(lambda *a: np.stack(a), *batches)
        state, metrics = run.step(state, frozen, run.put(batch, parts=True))
        yield step, state, metrics


def evaluate_fit(
    run: Fit, state: FitState, frozen: FitFrozen, source: Source, size: int
) -> dict[str, float]:
    """Means over every row of a source, in passes of `size` rows."""
    sums: dict[str, float] = {}
    for start in range(0, len(source), size):
        rows = range(start, min(start + size, len(source)))
        batch = run.put(source.batch(rows, size, 0), parts=False)
        found = jax.device_get(run.loss(state.params, frozen, batch))
        sums = {k: sums.get(k, 0.0) + float(v) for k, v in found.items()}
    count = max(sums.pop("count"), 1.0)
    return {k: v / count for k, v in sums.items()}
