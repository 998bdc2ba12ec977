"""Prompts and preference pairs: files to token arrays, in an order that can be resumed.

A prompt stream never ends and never drops a row: a data set that the batch does not
divide, or that is smaller than it, wraps around into its next (reshuffled) pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jppo.config import ConfigError, DataConfig
from jppo.types import Prompts


class DataError(ValueError):
    """Data that cannot be used: one line with file, row and what to do."""


def read_rows(path: str | Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a JSONL file, each an object with at least these string columns.

    Raises DataError naming file, line and column.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    rows = []
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
            for column in columns:
                if not isinstance(row.get(column), str):
                    raise DataError(
                        f"{path}:{number}: column {column!r} must be a string, got"
                        f" {row.get(column)!r}; the row has {sorted(row)}"
                    )
            rows.append(row)
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


class Pair(NamedTuple):
    """A preference: `chosen` was liked better than `rejected`."""

    prompt: str
    chosen: str
    rejected: str


def read_pairs(path: str | Path) -> list[Pair]:
    """Preference pairs from JSONL: `prompt` (may be empty), `chosen`, `rejected`."""
    rows = read_rows(path, ("prompt", "chosen", "rejected"))
    return [Pair(r["prompt"], r["chosen"], r["rejected"]) for r in rows]


def encode(
    tokenizer: Any, texts: Sequence[str], *, special: bool = True
) -> list[list[int]]:
    """Token ids a text, exactly as the tokenizer's own post-processing has them.

    Except that a text which brings its own BOS, as chat templates write it, gets no
    second one. special=False adds none at all: the text goes on from another.
    """
    rows = tokenizer(
        list(texts), return_attention_mask=False, add_special_tokens=special
    )["input_ids"]
    twice = [tokenizer.bos_token_id] * 2
    return [row[1:] if None not in twice and row[:2] == twice else row for row in rows]


def pad(
    rows: Sequence[Sequence[int]], width: int, pad_id: int, *, left: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32, mask bool), each `[b, width]`; every row must fit."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        at = slice(width - len(row), None) if left else slice(0, len(row))
        tokens[i, at], mask[i, at] = row, True
    return tokens, mask


class PromptData:
    """Tokenised prompts with the columns that travel on to the reward function."""

    def __init__(
        self,
        rows: Sequence[str | dict[str, Any]],
        tokenizer: Any,
        cfg: DataConfig,
        *,
        pad_id: int,
        room: int,
        seed: int,
    ):
        """room: most prompt tokens that the model's window leaves for a prompt."""
        if isinstance(rows, (str, bytes, Path)):
            raise DataError(f"prompts must be a list of strings, got {rows!r}")
        table = [r if isinstance(r, dict) else {cfg.column: r} for r in rows]
        if not table:
            raise DataError("the list of prompts is empty")
        if room < 1:
            raise DataError(
                "sampling.max_new_tokens leaves no room for a prompt in the model's"
                f" window: {room} tokens"
            )
        for i, row in enumerate(table):
            if not isinstance(row.get(cfg.column), str):
                raise DataError(
                    f"prompt {i}: column {cfg.column!r} must be a string, got"
                    f" {row.get(cfg.column)!r}"
                )
        ids = encode(tokenizer, [row[cfg.column] for row in table])
        limit = min(cfg.max_prompt_tokens or room, room)
        self.dropped = 0
        self.rows: list[dict[str, Any]] = []
        self.ids: list[list[int]] = []
        for i, (row, tokens) in enumerate(zip(table, ids, strict=True)):
            if not tokens:
                raise DataError(f"prompt {i} is empty: {row[cfg.column]!r}")
            if len(tokens) > limit:
                if cfg.overlong == "error":
                    raise DataError(
                        f"prompt {i} has {len(tokens)} tokens, the limit is {limit}:"
                        " raise data.max_prompt_tokens, lower sampling.max_new_tokens,"
                        " or set data.overlong=drop"
                    )
                self.dropped += 1
                continue
            self.rows.append(row)
            self.ids.append(list(tokens))
        if not self.rows:
            raise DataError(
                f"all {self.dropped} prompts are longer than {limit} tokens"
            )
        self.column, self.pad_id = cfg.column, pad_id
        self.width = cfg.max_prompt_tokens or max(map(len, self.ids))
        self.width = min(self.width, limit)
        self._shuffle, self._seed = cfg.shuffle, seed

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, cursor: int, count: int) -> list[int]:
        """Indices of `count` rows from `cursor`, rows already drawn in this run."""
        picked: list[int] = []
        while len(picked) < count:
            epoch, at = divmod(cursor + len(picked), len(self))
            indices = np.arange(len(self))
            if self._shuffle:
                indices = np.random.default_rng([self._seed, epoch]).permutation(
                    indices
                )
            picked += indices[at : at + count - len(picked)].tolist()
        return picked

    def batch(self, indices: Sequence[int], size: int | None = None) -> Prompts:
        """Left-padded prompts; filled up to `size` with rows of weight 0."""
        size = size or len(indices)
        ids = [self.ids[i] for i in indices] + [[]] * (size - len(indices))
        tokens, mask = pad(ids, self.width, self.pad_id, left=True)
        weight = np.zeros(size, np.float32)
        weight[: len(indices)] = 1.0
        row = np.arange(size, dtype=np.int32)
        host: tuple[Any, ...] = (tokens, mask, weight, row)  # placed by the caller
        return Prompts(*host)

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """The other columns of these rows, for the reward function."""
        names = sorted({k for i in indices for k in self.rows[i]} - {self.column})
        return {name: [self.rows[i].get(name) for i in indices] for name in names}

    def texts(self, indices: Sequence[int]) -> list[str]:
        return [self.rows[i][self.column] for i in indices]

    def batches(self, size: int) -> Iterator[tuple[list[int], Prompts]]:
        """One pass in order, the last batch filled with weight-0 rows (evaluation)."""
        for start in range(0, len(self), size):
            indices = list(range(start, min(start + size, len(self))))
            yield indices, self.batch(indices, size)


def pad_token_id(tokenizer: Any, stop_ids: Sequence[int]) -> int:
    """The pad token, or a stop token where there is none.

    Safe, because masks come from lengths and stop positions and never from ids.
    """
    pad_id = tokenizer.pad_token_id
    return int(stop_ids[0] if pad_id is None else pad_id)


def stop_token_ids(tokenizer: Any, stop: Sequence[str]) -> tuple[int, ...]:
    """EOS, then the id of each stop text. Raises ConfigError unless it is one token."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in stop:
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise ConfigError(
                f"sampling.stop text {text!r} is {len(found)} tokens, it must be one"
            )
        if found == [tokenizer.unk_token_id] and text != tokenizer.unk_token:
            raise ConfigError(f"sampling.stop text {text!r} is not in the vocabulary")
        ids += found
    if not ids:
        raise ConfigError("the tokenizer has no EOS token: give sampling.stop")
    return tuple(dict.fromkeys(int(i) for i in ids))
