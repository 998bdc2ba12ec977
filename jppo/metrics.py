"""What a run leaves behind while it runs: JSON lines and TensorBoard events.

`MetricWriter` appends to metrics.jsonl and samples.jsonl and closes them again, so a
killed run loses at most the line that it was writing; `read_jsonl` forgives that one.
Only the process that owns the run directory should hold a writer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np


def scalar(name: str, value: Any) -> float | int:
    """One host number out of a float, a NumPy or a JAX scalar.

    A float32 is read through its shortest decimal, so 0.1 stays 0.1 in the file
    and reads back as the same float32. Raises ValueError naming the metric.
    """
    array = np.asarray(jax.device_get(value))
    if array.size != 1 or array.dtype.kind in "OUSc":
        raise ValueError(
            f"metric {name!r} must be one real number, got {array.dtype} of shape "
            f"{array.shape}"
        )
    item = array.reshape(())[()]
    return int(item) if array.dtype.kind in "iub" else float(str(item))


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | int]:
    """Host numbers of a step's metrics, in their order, fetched in one transfer."""
    values = jax.device_get(list(metrics.values()))
    names = [prefix + name for name in metrics]
    return {k: scalar(k, v) for k, v in zip(names, values, strict=True)}


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, in order.

    A last line cut short by a kill is left out. Raises FileNotFoundError, and
    ValueError naming the line if any other is not a JSON object.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.readlines()  # not splitlines(): text may hold U+2028
    rows = []
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if i == len(lines) - 1 and not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {i + 1}: {error}") from None
        rows.append(row)
    return rows


class MetricWriter:
    """Appends a run's metrics and samples to its directory.

    metrics.jsonl holds an object a write, samples.jsonl an object a sample, both
    strict JSON in UTF-8: NaN and ±∞ are written as null (TensorBoard keeps them).
    A directory that already holds either file needs `resume_step`: lines with a
    later step are dropped, so that a resumed run leaves none twice; −1 drops all.
    Raises FileExistsError if it is missing.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        resume_step: int | None = None,
        tensorboard: bool = True,
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._events = None
        for name in ("metrics.jsonl", "samples.jsonl"):
            _drop_after(self.folder / name, resume_step)
        if tensorboard:
            from tensorboardX import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self._events = SummaryWriter(
                str(self.folder / "tensorboard"), purge_step=purge
            )

    def write(self, step: int, metrics: Mapping[str, Any], prefix: str = "") -> None:
        """Appends one line `{"step": step, prefix + name: value, …}`."""
        row = scalars(metrics, prefix)
        self._append("metrics.jsonl", step, [row])
        if self._events is not None:
            for name, value in row.items():
                self._events.add_scalar(name, value, int(step))
            self._events.flush()

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line a sample, `{"step": step, "prompt": …, …}`."""
        rows = [
            {
                k: v if v is None or isinstance(v, str) else scalar(k, v)
                for k, v in row.items()
            }
            for row in rows
        ]
        self._append("samples.jsonl", step, rows)
        if self._events is not None and rows:
            # Indented by four: Markdown shows it verbatim, whatever a model wrote.
            text = "\n\n---\n\n".join(
                "\n".join(
                    "    " + line
                    for key, value in row.items()
                    for line in f"{key}: {value}".splitlines()
                )
                for row in rows
            )
            text = text.encode("utf-8", "replace").decode()
            self._events.add_text("samples", text, int(step))
            self._events.flush()

    def close(self) -> None:
        """Closes the TensorBoard file; the JSON files are never held open."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _append(self, name: str, step: int, rows: Sequence[dict[str, Any]]) -> None:
        if any("step" in row for row in rows):
            raise ValueError(f"'step' is the writer's own key in {name}")
        _write_lines(self.folder / name, [{"step": int(step)} | r for r in rows], "a")


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]], mode: str) -> None:
    def strict(value):
        infinite = isinstance(value, float) and not math.isfinite(value)
        return None if infinite else value

    text = "".join(
        json.dumps(
            {k: strict(v) for k, v in row.items()}, ensure_ascii=False, allow_nan=False
        )
        + "\n"
        for row in rows
    )
    # A lone surrogate, which a tokenizer can emit, becomes its JSON escape.
    with open(path, mode, encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _drop_after(path: Path, step: int | None) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    if step is None:
        raise FileExistsError(
            f"{path} already holds a run: resume it with resume_step=, start it anew "
            "with resume_step=-1, or choose another directory"
        )
    kept = [row for row in read_jsonl(path) if row.get("step", 0) <= step]
    fresh = path.with_suffix(".tmp")
    _write_lines(fresh, kept, "w")
    os.replace(fresh, path)
