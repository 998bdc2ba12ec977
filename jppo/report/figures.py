"""How the report draws: matplotlib figures turned into inline SVG.

Figures are made without pyplot, so nothing global is opened or left behind. Text stays
text in the page's own font, and colours become CSS variables: the same SVG is readable
on a light and on a dark page.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The colour drawn -> the CSS variable that it becomes in the page.
THEME = {
    "#1f2328": "--ink",
    "#656d76": "--muted",
    "#d8dee4": "--rule",
    "#2f6fb0": "--blue",
    "#b7791f": "--gold",
    "#b5483a": "--red",
    "#3a7d5c": "--green",
}
INK, MUTED, RULE, BLUE, GOLD, RED, GREEN = THEME
EARLY, LATE = "#7d93c9", "#d2622a"  # first and last step, legible on both pages
MAX_POINTS = 500
FEW_POINTS = 60  # a path of more is a line without dots


def series(rows: Sequence[Mapping[str, Any]], *names: str) -> list[np.ndarray]:
    """Steps and values [n] of rows that hold every name; a non-number is NaN."""
    kept = [row for row in rows if all(name in row for name in ("step", *names))]
    return [
        np.array(
            [v if isinstance(v := row[k], (int, float)) else np.nan for row in kept],
            float,
        )
        for k in ("step", *names)
    ]


def path(rows, *names: str) -> list[np.ndarray]:
    """Steps and values where all are finite, thinned; a long path is smoothed."""
    steps, *values = series(rows, *names)
    good = np.isfinite(values).all(axis=0)
    steps, *values = (thin(x[good]) for x in (steps, *values))
    many = len(steps) > FEW_POINTS
    return [steps, *(smooth(x) if many else x for x in values)]


def draw_path(ax, steps, x, y, *, line: bool = True) -> None:
    """Points [n], joined if `line`, coloured by step from EARLY to LATE."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    cmap = LinearSegmentedColormap.from_list("steps", [EARLY, "#a77fa6", LATE])
    norm = Normalize(steps[0], max(steps[-1], steps[0] + 1))
    if line:
        points = np.stack([x, y], axis=1)
        segments = np.stack([points[:-1], points[1:]], axis=1)
        ax.add_collection(
            LineCollection(list(segments), array=steps[1:], cmap=cmap, norm=norm)
        )
    if len(x) <= FEW_POINTS or not line:
        size = 9 if line else 16
        ax.scatter(x, y, c=steps, cmap=cmap, norm=norm, s=size, linewidths=0)
    else:
        ax.autoscale_view()


def beside(colour: str) -> dict:
    """How a label stands to the right of the point that it names."""
    return dict(
        xytext=(5, 0), textcoords="offset points", va="center", color=colour, fontsize=8
    )


def thin(x: np.ndarray) -> np.ndarray:
    """At most MAX_POINTS values, the last among them: a page stays small."""
    if len(x) <= MAX_POINTS:
        return x
    return x[np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)]


def smooth(x: np.ndarray) -> np.ndarray:
    """Centred moving mean over a twentieth of a long series; a short one as it is."""
    half = len(x) // 40
    finite = np.isfinite(x)
    sums = np.append(0.0, np.cumsum(np.where(finite, x, 0.0)))
    counts = np.append(0, np.cumsum(finite))
    low = np.maximum(np.arange(len(x)) - half, 0)
    high = np.minimum(np.arange(len(x)) + half + 1, len(x))
    n = counts[high] - counts[low]
    mean = (sums[high] - sums[low]) / np.maximum(n, 1)
    return np.where(n > 0, mean, np.nan) if half else x


def style():
    """The one look of all figures, for as long as its `with` block lasts."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "jppo",  # the same run gives the same page
            "font.size": 8.5,
            "text.color": INK,
            "axes.labelcolor": MUTED,
            "axes.edgecolor": RULE,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "axes.formatter.useoffset": False,
            "axes.formatter.limits": (-4, 5),
            "grid.color": RULE,
            "grid.linewidth": 0.6,
            "xtick.color": RULE,
            "ytick.color": RULE,
            "xtick.labelcolor": MUTED,
            "ytick.labelcolor": MUTED,
            "lines.linewidth": 1.6,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "legend.handlelength": 1.2,
            "legend.borderpad": 0,
        }
    )


def new_figure(panels: int = 1, *, left: float = 0.14):
    """A figure and its axes, one above the other, at margins that all cards share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 2.9))
    figure.patch.set_visible(False)
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    # Fixed: a layout engine would draw everything twice, and align nothing.
    figure.subplots_adjust(left=left, right=0.98, top=0.93, bottom=0.15, hspace=0.28)
    for ax in axes:
        ax.patch.set_visible(False)
        ax.yaxis.set_label_coords(0.036, 0.5, transform=_blend(figure, ax))
    return figure, axes


def _blend(figure, ax):
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(figure.transFigure, ax.transAxes)


def to_svg(figure, title: str) -> str:
    """The figure as an inline <svg>: no prolog, no metadata, no web address."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    for colour, variable in THEME.items():
        svg = svg.replace(colour, f"var({variable})")
    label = html.escape(title, quote=True)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
