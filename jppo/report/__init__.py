"""The page that shows a run: `write_report(run_dir)` turns its files into report.html.

It reads what the run directory holds and leaves out the section of any file that is
missing. All words and samples in it are escaped; all numbers come from the files.
"""

from __future__ import annotations

import html
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jppo.console import number
from jppo.metrics import read_jsonl
from jppo.report.figures import series
from jppo.report.fits import fit_plots
from jppo.report.page import PAGE, STYLE
from jppo.report.plots import plots

MAX_SAMPLES = 24
MAX_CHARS = 3000  # of one prompt or completion

# summary.json "before"/"after": key -> (name, what it is, unit).
MEASURES = {
    "reward": ("Reward", "what the policy was trained on", ""),
    "gold": ("Gold score", "a yardstick that it was not trained on", ""),
    "kl": ("KL", "nats a sequence, from the reference", " nats"),
    "length": ("Length", "tokens a completion", " tokens"),
    "distinct_2": ("Distinct-2", "share of bigrams that differ: variety", ""),
    "loss": ("Loss", "on held-out rows", ""),
    "pair_accuracy": ("Pairs in order", "share, of held-out pairs", ""),
    "score_margin": ("Margin", "score of chosen − rejected", ""),
    "reward_margin": ("Margin", "implicit reward of chosen − rejected", ""),
    "chosen_logp": ("Chosen", "nats an answer", " nats"),
    "rejected_logp": ("Rejected", "nats an answer", " nats"),
}


def write_report(run_dir: str | os.PathLike) -> Path:
    """Writes `run_dir`/report.html from the run's files and returns its path.

    Raises FileNotFoundError if metrics.jsonl is missing; every other file may be.
    """
    run_dir = Path(run_dir)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    samples, config = run_dir / "samples.jsonl", run_dir / "config.yaml"
    path = run_dir / "summary.json"
    summary = _mapping(json.loads(path.read_text("utf-8")) if path.exists() else None)
    before, after = (_measures(summary, rows, when) for when in ("before", "after"))
    sections = (
        _facts(summary, before, after),
        _plots(rows, summary),
        _samples(read_jsonl(samples) if samples.exists() else []),
        _config(config.read_text("utf-8", "replace") if config.exists() else ""),
    )
    page = PAGE.substitute(
        title=_text(run_dir.resolve().name),
        style=STYLE,
        meta=_meta(run_dir / "metrics.jsonl", rows, summary),
        lead=_lead(rows, before, after),
        body="\n".join(section for section in sections if section),
    )
    fresh = run_dir / "report.html.tmp"
    fresh.write_text(page, "utf-8", "replace", newline="\n")
    return fresh.replace(run_dir / "report.html")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _num(value: Any) -> str:
    return number(value).replace("-", "−") if _finite(value) else "–"


def _measures(summary: Mapping, rows: Sequence[Mapping], when: str) -> dict[str, Any]:
    """The summary's numbers or, in a run without one, its first or last step's."""
    found = {k: v for k, v in _mapping(summary.get(when)).items() if _finite(v)}
    if found or summary.get("before") or summary.get("after"):
        return found
    names = {"reward": "scores", "gold": "gold", "kl": "kl", "length": "lengths"}
    curves = {k: series(rows, name)[1] for k, name in names.items()}
    curves = {k: x[[math.isfinite(v) for v in x]] for k, x in curves.items()}
    end = 0 if when == "before" else -1
    return {k: float(x[end]) for k, x in curves.items() if len(x)}


def _meta(path: Path, rows: Sequence[Mapping], summary: Mapping) -> str:
    parts = [f"{_last_step(rows):,} steps"]
    seconds = [v for v in _mapping(summary.get("seconds")).values() if _finite(v)]
    total = _mapping(summary.get("seconds")).get("total", sum(seconds))
    if _finite(total) and total > 0:
        hours, minutes = int(total) // 3600, int(total) // 60 % 60
        clock = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min "
        parts.append(clock + (f"{int(total) % 60:02d} s" if not hours else ""))
    stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    return " · ".join([*parts, f"last step written {stamp}"])


def _last_step(rows: Sequence[Mapping]) -> int:
    return max((int(row.get("step", 0)) for row in rows), default=0)


def _lead(rows: Sequence[Mapping], before: Mapping, after: Mapping) -> str:
    """The run in one paragraph, from its numbers alone."""
    if not rows:
        return "No step has been written yet."
    both = {k for k in before if k in after}
    words = []
    if "reward" in both:
        words.append(f"Over {_last_step(rows):,} steps the mean reward {{reward}}.")
    if "loss" in both:
        words.append(f"Over {_last_step(rows):,} steps the held-out loss {{loss}}.")
    if "pair_accuracy" in both:
        words.append("The share of held-out pairs in the right order {pair_accuracy}.")
    if "gold" in both:
        words.append("The gold score, on which the policy was never trained, {gold}.")
    if "kl" in after:
        kl = _num(after["kl"])
        words.append(
            f"The policy ended <b>{kl} nats</b> of KL away from the reference."
        )
    if "length" in both:
        words.append("Completion length {length}.")
    if "distinct_2" in both:
        words.append("Variety (distinct-2) {distinct_2}.")
    text = " ".join(words).format(**{k: _change(before[k], after[k], k) for k in both})
    skipped = sum(row["skipped"] for row in rows if _finite(row.get("skipped")))
    if skipped:
        text += f' <span class="warn">{skipped:.0f} optimizer steps were skipped: '
        text += "their gradients were not finite.</span>"
    if {"reward", "gold"} <= both and after["reward"] > before["reward"]:
        if after["gold"] < before["gold"]:
            text += ' <span class="warn">Reward rose while gold fell: the policy has '
            text += "learnt the reward model rather than the task.</span>"
    return text or f"{_last_step(rows):,} steps were written."


def _change(old: float, new: float, key: str) -> str:
    unit = MEASURES[key][2] if key in MEASURES else ""
    if abs(new - old) <= 0.01 * max(abs(old), abs(new)):
        return f"stayed at <b>{_num(new)}{unit}</b>"
    verb = "rose" if new > old else "fell"
    return f"{verb} from {_num(old)} to <b>{_num(new)}{unit}</b>"


def _facts(summary: Mapping, before: Mapping, after: Mapping) -> str:
    cards = [_before_after(before, after), _reward_model(summary.get("reward_model"))]
    cards = "".join(f'<div class="card">{card}</div>' for card in cards if card)
    return f'<section class="grid facts">{cards}</section>' if cards else ""


def _before_after(before: Mapping, after: Mapping) -> str:
    """The table; `<key>_se` in the summary is shown as the ± of `<key>`."""
    keys = [k for k in MEASURES if k in before or k in after]
    keys += [k for k in {**before, **after} if k not in keys]
    keys = [k for k in keys if not (k.endswith("_se") and k[:-3] in keys)]
    lines = []
    for key in keys:
        name, what, _ = MEASURES.get(key, (key.replace("_", " "), "", ""))
        cells = [_with_error(before, key), _with_error(after, key)]
        delta = "–"
        if key in before and key in after:
            change = after[key] - before[key]
            delta = ("+" if change > 0 else "") + _num(change)
        lines.append(
            f"<tr><td>{_text(name)}<small>{what}</small></td><td>{cells[0]}</td>"
            f'<td class="after">{cells[1]}</td><td>{delta}</td></tr>'
        )
    if not lines:
        return ""
    return (
        '<h3>Before and after</h3><div class="scroll"><table><thead><tr><th></th>'
        "<th>before</th><th>after</th><th>change</th></tr></thead><tbody>"
        f"{''.join(lines)}</tbody></table></div>"
    )


def _with_error(values: Mapping, key: str) -> str:
    error = values.get(f"{key}_se")
    suffix = "" if error is None else f' <span class="se">± {_num(error)}</span>'
    return _num(values.get(key)) + suffix


def _reward_model(card: Any) -> str:
    card = {k: v for k, v in _mapping(card).items() if _finite(v)}
    meters = ""
    for key, name, kind in (
        ("pair_accuracy", "This reward model", "meter"),
        ("tfidf_pair_accuracy", "TF-IDF yardstick", "meter plain"),
    ):
        if key in card:
            percent = 100 * card.pop(key)
            meters += (
                f'<div class="{kind}"><div><span>{name}</span>'
                f'<b>{percent:.1f} %</b></div><span class="track">'
                f'<i style="width:{percent:.1f}%"></i><s></s></span></div>'
            )
    facts = "".join(
        f"<div><dt>{_text(k.replace('_', ' '))}</dt><dd>{_num(v)}</dd></div>"
        for k, v in card.items()
    )
    if not meters and not facts:
        return ""
    note = "Share of held-out pairs put in the right order; the notch is chance."
    note = f'<p class="note">{note}</p>' if meters else ""
    facts = f"<dl>{facts}</dl>" if facts else ""
    return f"<h3>Reward model</h3>{meters}{note}{facts}"


def _plots(rows: Sequence[Mapping], summary: Mapping) -> str:
    drawn = fit_plots(rows, summary.get("calibration"))
    drawn += plots(rows, _mapping(summary.get("seconds")))
    cards = "".join(
        f'<div class="card plot"><h3>{_text(card["title"])}</h3>{card["svg"]}'
        f'<p>{_text(card["healthy"])}</p><p class="here">Here: '
        f"{_text(card['here']).replace('-', '−')}.</p></div>"
        for card in drawn
    )
    return f'<h2>Curves</h2><section class="grid">{cards}</section>' if cards else ""


def _samples(rows: Sequence[Mapping]) -> str:
    """First and last step side by side, joined by prompt (the n-th of equals)."""
    steps = sorted({row.get("step", 0) for row in rows})
    if not steps:
        return ""
    sides = [{}, {}]
    for side, step in zip(sides, (steps[0], steps[-1]), strict=True):
        seen: dict[Any, int] = {}
        for row in rows:
            if row.get("step", 0) == step:
                prompt = str(row.get("prompt", ""))
                seen[prompt] = seen.get(prompt, 0) + 1
                side[prompt, seen[prompt]] = row
    ends = (("before", steps[0]), ("after", steps[-1]))
    if len(steps) == 1:
        ends, sides = (("after", steps[0]),), sides[:1]
    keys = [key for key in sides[0] if all(key in side for side in sides)]
    cards = "".join(
        f'<div class="card"><p class="prompt">{_clip(key[0])}</p><div class="pair">'
        + "".join(_side(side[key], *end) for side, end in zip(sides, ends, strict=True))
        + "</div></div>"
        for key in keys[:MAX_SAMPLES]
    )
    note = "The same prompts before and after, in the order in which they were written"
    note += "." if len(keys) <= MAX_SAMPLES else f"; {MAX_SAMPLES} of {len(keys)}."
    note = f'<p class="note">{note}</p>'
    return f'<h2>Samples</h2>{note}<div class="samples">{cards}</div>' if keys else ""


def _side(row: Mapping, when: str, step: int) -> str:
    marks = "".join(
        f"<span>{name} <b>{_num(row[name])}</b></span>"
        for name in ("score", "gold")
        if _finite(row.get(name))
    )
    return (
        f'<div class="side {when}"><h4><span>step {_text(step)}</span>{marks}</h4>'
        f"<p>{_clip(str(row.get('completion', '')).strip(' '))}</p></div>"
    )


def _clip(text: str) -> str:
    return _text(text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …")


def _config(text: str) -> str:
    if not text.strip():
        return ""
    return (
        f'<details class="card"><summary>Config</summary><pre>{_text(text)}</pre>'
        "</details>"
    )
