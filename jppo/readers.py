"""Tables from local files: JSON lines, Parquet, and what `datasets` saves to disk.

Values come as plain Python: strings, numbers, lists, dicts. Parquet and Arrow are read
by pyarrow, which is loaded only then; the `datasets` package is never needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class DataError(ValueError):
    """Data that cannot be used: one line with file, row and what to do."""


class Rows(list[Row]):
    """Rows of a file; `places[i]` says where row i stands, for error messages."""

    places: list[str]

    @classmethod
    def of(cls, located: Iterator[tuple[str, Row]]) -> Rows:
        rows, places = cls(), []
        for place, row in located:
            rows.append(row)
            places.append(place)
        rows.places = places
        return rows


def place(rows: Sequence[Any], i: int, noun: str = "row") -> str:
    """Where row i is from: "file.jsonl:3", or "row 3" of a list in memory."""
    return rows.places[i] if isinstance(rows, Rows) else f"{noun} {i}"


def read_table(path: str | Path) -> Rows:
    """All rows of a table, in order, as a list of dicts.

    path is one of
    - a file of JSON lines (whatever its name, if not one of the following),
    - a `.parquet` or `.arrow` file,
    - a folder of Parquet files. Names like `train-00000-of-00002.parquet` are splits:
      `folder/train` is one of them, and where there are several, one must be chosen,
    - a folder that `datasets.Dataset.save_to_disk` wrote, or one split of a
      `DatasetDict`: `folder/train`.

    Raises DataError: one line that names the file, and the row where there is one.
    """
    path = Path(path)
    if path.is_dir():
        found = _read_folder(path)
    elif path.is_file():
        found = _READERS.get(path.suffix.lower(), _read_lines)(path)
    elif path.parent.is_dir() and path.name in (splits := _splits(path.parent)):
        found = _read_each(splits[path.name])
    else:
        raise DataError(f"{path}: no such file{_choice(path.parent)}")
    rows = Rows.of(found)
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _read_lines(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # not UTF-8, or not JSON
                raise DataError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}:{number}: expected an object, got {str(row)[:40]!r}"
                )
            yield f"{path}:{number}", row


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise DataError(
            f'{path}: reading it needs pyarrow: pip install "jppo[data]"'
        ) from None
    return pyarrow


def _read_arrow(path: Path) -> Iterator[tuple[str, Row]]:
    """An Arrow IPC stream, the format of `datasets`, or an IPC file."""
    pa = _pyarrow(path)

    def batches(source: Any) -> Iterator[Any]:
        with path.open("rb") as file:
            magic = file.read(6)
        if magic == b"ARROW1":
            reader = pa.ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from pa.ipc.open_stream(source)

    return _of_batches(path, "an Arrow stream", pa, batches)


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    pa = _pyarrow(path)
    open_file = pa.parquet.ParquetFile
    return _of_batches(
        path, "a Parquet file", pa, lambda source: open_file(source).iter_batches()
    )


def _of_batches(
    path: Path, kind: str, pa: Any, batches: Any
) -> Iterator[tuple[str, Row]]:
    """Rows of record batches, numbered from 0."""
    number = 0
    try:
        with pa.memory_map(str(path)) if path.stat().st_size else path.open("rb") as f:
            for batch in batches(f):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        says = " ".join(str(error).split())
        raise DataError(f"{path}: not {kind}: {says}") from None


_READERS = {".parquet": _read_parquet, ".arrow": _read_arrow}


def _read_each(paths: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    for path in paths:
        yield from _READERS[path.suffix](path)


def _splits(folder: Path) -> dict[str, list[Path]]:
    """Parquet files of a folder by the split in their names, "" where there is none."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.parquet")):
        name = re.fullmatch(r"(.+?)-\d+-of-\d+(-.*)?", path.stem)
        found.setdefault(name[1] if name else "", []).append(path)
    return found


def _choice(folder: Path) -> str:
    """What a folder would have to offer, as the end of an error message."""
    names = _saved_splits(folder) or sorted(filter(None, _splits(folder)))
    return f"; {folder} holds the splits {', '.join(names)}" if names else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: unreadable: {error}") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path}: expected an object, got {str(tree)[:40]!r}")
    return tree


def _saved_splits(folder: Path) -> list[str]:
    file = folder / "dataset_dict.json"
    return list(_json(file).get("splits", [])) if file.is_file() else []


def _read_folder(folder: Path) -> Iterator[tuple[str, Row]]:
    if (folder / "state.json").is_file():
        return _read_each(_saved_files(folder))
    splits = _splits(folder)
    names = _saved_splits(folder) or list(splits)
    if (folder / "dataset_dict.json").is_file() or len(names) > 1:
        shown = ", ".join(name or "(files without a split)" for name in names)
        first = folder / next(filter(None, names), "train")
        raise DataError(f"{folder} holds the splits {shown}: give one, as {first}")
    if not splits:
        raise DataError(
            f"{folder}: neither Parquet files nor a data set saved by `datasets`"
        )
    return _read_each(splits[names[0]])


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of `Dataset.save_to_disk`, in the order of its rows."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: saved by an old version of `datasets` with an index of rows:"
            " save it again after flatten_indices()"
        )
    files = [folder / entry["filename"] for entry in state.get("_data_files", [])]
    for file in files:
        if not file.is_file():
            raise DataError(f"{folder}: state.json names {file.name}, which is missing")
    return files
