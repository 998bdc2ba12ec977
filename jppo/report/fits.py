"""What the report plots of a supervised run: losses, pairs, and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.report.figures import BLUE, GOLD, GREEN, MUTED, RED, new_figure, style, to_svg
from jppo.report.plots import Curves, Panel, curve_card, present_in

FIT_CURVES = (
    Curves(
        "Loss",
        (
            Panel(
                "loss",
                (("loss", "training", BLUE), ("eval_loss", "held out", GOLD)),
            ),
        ),
        "Both fall, steeply first. Held-out loss that turns up while training loss "
        "falls is overfitting: fewer epochs, a smaller model or more data.",
    ),
    Curves(
        "Pairs in the right order",
        (
            Panel(
                "share of pairs",
                (
                    ("pair_accuracy", "training", BLUE),
                    ("eval_pair_accuracy", "held out", GOLD),
                ),
                percent=True,
            ),
            Panel(
                "margin",
                (
                    ("score_margin", "score margin", BLUE),
                    ("reward_margin", "implicit reward margin", BLUE),
                ),
            ),
        ),
        "From 50 % up; people agree with one another on 65 to 80 % of such pairs. A "
        "margin that grows without end while accuracy stays is over-confidence.",
    ),
    Curves(
        "Log-probs of the answers",
        (
            Panel(
                "nats an answer",
                (
                    ("chosen_logp", "chosen", GREEN),
                    ("rejected_logp", "rejected", RED),
                ),
            ),
        ),
        "The gap between the two is what DPO widens. Both falling steeply means that "
        "the policy leaves the data altogether: raise β or lower the learning rate.",
    ),
    Curves(
        "Steps",
        (
            Panel("gradient norm", (("grad_norm", "gradient norm", BLUE),)),
            Panel("learning rate", (("lr", "learning rate", GOLD),)),
        ),
        "Norms (before clipping) of a steady size. Spikes are odd rows or too large a "
        "learning rate.",
    ),
)


def fit_plots(rows: Sequence[Mapping[str, Any]], calibration: Any) -> list[dict]:
    """Cards {title, svg, healthy, here} of a supervised run; none of another one."""
    present = present_in(rows)
    if "loss" not in present:
        return []
    cards = [curve_card(curves, rows, present) for curves in FIT_CURVES]
    return [card for card in (*cards, _calibration_card(calibration)) if card]


def _calibration_card(groups: Any) -> dict | None:
    """How often a reward model is right, against how sure it is."""
    if not isinstance(groups, list) or not groups:
        return None
    sure, right, n = (
        np.array([g[k] for g in groups], float)
        for k in ("confidence", "accuracy", "pairs")
    )
    error = np.sqrt(right * (1 - right) / n)
    with style():
        figure, (ax,) = new_figure()
        ax.plot([0.5, 1], [0.5, 1], color=MUTED, linewidth=0.8, linestyle="--")
        ax.errorbar(sure, right, yerr=error, color=BLUE, marker="o", markersize=3)
        ax.set(xlabel="confidence σ(|r₁ − r₂|)", ylabel="share that is right")
        svg = to_svg(figure, "Calibration")
    gap = float((n * np.abs(sure - right)).sum() / n.sum())
    return dict(
        title="Calibration",
        svg=svg,
        healthy="Held-out pairs in groups of equal size. On the dashed line the model "
        "is as sure as it is right; below it, over-confident.",
        here=f"expected calibration error {gap:.3f} over {n.sum():.0f} pairs",
    )
