"""What the report plots, and what each plot should look like in a healthy run.

`plots` gives the cards that the data allow: a metric that a run did not write takes
its panel, or its whole card, away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.console import number
from jppo.report.figures import (
    BLUE,
    FEW_POINTS,
    GOLD,
    GREEN,
    LATE,
    MUTED,
    RED,
    beside,
    draw_path,
    new_figure,
    path,
    series,
    smooth,
    style,
    thin,
    to_svg,
)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes over steps: y label and (metric, label, colour) lines."""

    ylabel: str
    lines: tuple[tuple[str, str, str], ...]
    percent: bool = False
    floor: float = -math.inf


@dataclasses.dataclass(frozen=True)
class Curves:
    """A card of panels, one above the other, and what healthy looks like."""

    title: str
    panels: tuple[Panel, ...]
    healthy: str


REWARD = Curves(
    "Reward",
    (
        Panel(
            "reward",
            (("scores", "reward", BLUE), ("rewards", "reward − β·KL", MUTED)),
        ),
        Panel("gold", (("gold", "gold", GOLD),)),
    ),
    "A steady rise that flattens, and gold rises along. Reward that climbs while gold "
    "stalls or falls: the policy has learnt the reward model, not the task.",
)

CURVES = (
    Curves(
        "Distance from the reference",
        (Panel("KL, nats a sequence", (("kl", "KL", BLUE),)),),
        "KL climbs smoothly and levels off. A jump means that a step was too large; "
        "below zero, sampling and scoring disagree about the distribution.",
    ),
    Curves(
        "Entropy",
        (Panel("nats a token", (("entropy", "entropy", BLUE),)),),
        "A slow fall is learning. A fall to near zero is collapse: one answer for "
        "every prompt. A steady rise means that the policy is coming apart.",
    ),
    Curves(
        "Size of the update",
        (
            Panel("clipped tokens", (("clip_frac", "clip_frac", BLUE),), percent=True),
            Panel(
                "approx. KL, nats",
                (("approx_kl", "½ mean Δ²", BLUE), ("approx_kl_k3", "k3", GOLD)),
            ),
        ),
        "A clip_frac of a few per cent is healthy; above 30 % the step is too large, "
        "and at 0 % for long it is too small. approx_kl stays below about .05.",
    ),
    Curves(
        "Critic",
        (
            Panel("value loss", (("value_loss", "value_loss", BLUE),)),
            Panel(
                "explained var.",
                (("explained_variance", "explained_variance", GREEN),),
                floor=-1.0,
            ),
        ),
        "Explained variance rises towards 1; at 0 the critic knows no more than the "
        "mean return. Below 0 it misleads: warm it up or raise its learning rate.",
    ),
    Curves(
        "Completions",
        (
            Panel("length, tokens", (("lengths", "length", BLUE),)),
            Panel("reached a stop", (("stopped_frac", "stopped", GREEN),), True),
        ),
        "Length that climbs along with the reward is worth a look at the samples: the "
        "reward may pay for length. A falling share of stops means endless answers.",
    ),
    Curves(
        "KL coefficient",
        (Panel("β", (("beta", "beta", BLUE),)),),
        "An adaptive β settles once KL is at its target. One that keeps climbing is "
        "losing to the reward.",
    ),
    Curves(
        "Gradients",
        (
            Panel(
                "gradient norm",
                (
                    ("grad_norm_actor", "actor", BLUE),
                    ("grad_norm_critic", "critic", GOLD),
                ),
            ),
            Panel("largest ratio", (("ratio_max", "ratio_max", RED),)),
        ),
        "Norms (before clipping) of a steady size. A ratio far above 2 comes from "
        "tokens that the old policy found unlikely; many of them strain the clip.",
    ),
    Curves(
        "Speed",
        (
            Panel("seconds a step", (("seconds", "seconds", BLUE),)),
            Panel("tokens a second", (("tokens_per_second", "tokens/s", GREEN),)),
        ),
        "Flat after the first step, which compiles. Later spikes are checkpoints, "
        "evaluation or a recompilation.",
    ),
)


def plots(rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, Any]) -> list[dict]:
    """Cards {title, svg, healthy, here} in reading order, as the data allow."""
    present = present_in(rows)
    cards = [curve_card(REWARD, rows, present), _path_card(rows)]
    cards.append(_gold_card(rows))
    for curves in CURVES:
        if curves.title == "KL coefficient" and len(set(series(rows, "beta")[1])) < 2:
            continue  # a constant needs no plot
        cards.append(curve_card(curves, rows, present))
    cards.append(_seconds_card(seconds))
    return [card for card in cards if card is not None]


def present_in(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the metrics that have a finite value somewhere."""
    return {k for k in set().union(*rows) if np.isfinite(series(rows, k)[1]).any()}


def curve_card(curves: Curves, rows, present: set[str]) -> dict | None:
    """One card, without the panels and lines for which there is no data."""
    panels = [
        dataclasses.replace(p, lines=tuple(x for x in p.lines if x[0] in present))
        for p in curves.panels
    ]
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return None
    with style():
        figure, axes = new_figure(len(panels))
        for ax, panel in zip(axes, panels, strict=True):
            _draw_panel(ax, panel, rows)
        axes[-1].set_xlabel("step")
        svg = to_svg(figure, curves.title)
    here = "; ".join(
        f"{label} {_span(series(rows, name)[1], panel.percent)}"
        for panel in panels
        for name, label, _ in panel.lines[:1]
    )
    return dict(title=curves.title, svg=svg, healthy=curves.healthy, here=here)


def _draw_panel(ax, panel: Panel, rows) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for name, label, colour in panel.lines:
        steps, values = (thin(x) for x in series(rows, name))
        marker = "o" if len(steps) < 3 else None
        if len(steps) > FEW_POINTS:  # the raw line faintly, a moving mean on top
            ax.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
            values = smooth(values)
        ax.plot(steps, values, color=colour, label=label, marker=marker)
    if panel.percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        ax.set_ylim(bottom=0)
    if ax.get_ylim()[0] < panel.floor:
        ax.set_ylim(bottom=panel.floor)
    ax.set_ylabel(panel.ylabel)
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10), integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
    if len(panel.lines) > 1:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 0.97), ncols=3)


def _path_card(rows) -> dict | None:
    steps, kl, scores = path(rows, "kl", "scores")
    if not len(steps):
        return None
    with style():
        figure, (ax,) = new_figure()
        _, x, gold = path(rows, "kl", "gold")
        if len(gold):
            marker = "D" if len(gold) <= FEW_POINTS else None
            ax.plot(x, gold, color=GOLD, linewidth=1, marker=marker, markersize=2.5)
            ax.annotate("gold", (x[-1], gold[-1]), **beside(GOLD))
        draw_path(ax, steps, kl, scores)
        ax.annotate("reward", (kl[-1], scores[-1]), **beside(LATE))
        ax.set(xlabel="KL from the reference, nats a sequence", ylabel="score")
        ax.margins(x=0.12)
        svg = to_svg(figure, "What the reward cost in KL")
    return dict(
        title="What the reward cost in KL",
        svg=svg,
        healthy="A path up and to the right that has not yet bent flat. Where gold "
        "turns down, more KL buys only reward-model error: stop there or raise β.",
        here=f"colour runs from step {steps[0]:.0f} (blue) to {steps[-1]:.0f} (orange)",
    )


def _gold_card(rows) -> dict | None:
    steps, scores, gold = series(rows, "scores", "gold")
    good = np.isfinite(scores) & np.isfinite(gold)
    if not good.any():
        return None
    here = f"{good.sum()} steps"
    if good.sum() > 2 and scores[good].std() > 0 and gold[good].std() > 0:
        r = np.corrcoef(scores[good], gold[good])[0, 1]
        here = f"correlation over steps r = {r:.2f}"
    with style():
        figure, (ax,) = new_figure()
        draw_path(ax, *(thin(x[good]) for x in (steps, scores, gold)), line=False)
        ax.set(xlabel="reward (what was trained on)", ylabel="gold (what was not)")
        svg = to_svg(figure, "Gold against reward")
    return dict(
        title="Gold against reward",
        svg=svg,
        healthy="Points on a rising line, blue (early) to orange (late). If the late "
        "points turn down, the reward has stopped standing for what it should.",
        here=here,
    )


def _seconds_card(seconds: Mapping[str, Any]) -> dict | None:
    parts = {
        k: float(v)
        for k, v in seconds.items()
        if isinstance(v, (int, float)) and math.isfinite(v) and k != "total"
    }
    if not parts:
        return None
    with style():
        figure, (ax,) = new_figure(left=min(0.04 + 0.015 * max(map(len, parts)), 0.5))
        bars = ax.barh(list(parts), list(parts.values()), color=BLUE, height=0.6)
        ax.bar_label(
            bars, [f"{number(v)} s" for v in parts.values()], padding=4, color=MUTED
        )
        ax.invert_yaxis()
        ax.margins(x=0.18)
        ax.grid(False)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("seconds")
        svg = to_svg(figure, "Where the time went")
    total = seconds.get("total", sum(parts.values()))
    return dict(
        title="Where the time went",
        svg=svg,
        healthy="Generation is usually the longest part of a PPO step.",
        here=f"{number(float(total))} s in all",
    )


def _span(x: np.ndarray, percent: bool) -> str:
    x = x[np.isfinite(x)] * (100 if percent else 1)
    unit = " %" if percent else ""
    text = f"{number(float(x[0]))} → {number(float(x[-1]))}{unit}"
    if x.max() > max(x[0], x[-1]):
        text += f", highest {number(float(x.max()))}{unit}"
    return text
