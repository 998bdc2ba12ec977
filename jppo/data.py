"""Prompts and preference pairs: files to token arrays, in an order that can be resumed.

A prompt stream never ends and never drops a row: a data set that the batch does not
divide, or that is smaller than it, wraps around into its next (reshuffled) pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jppo.chat import Prompt, is_chat, render_prompt
from jppo.config import DataConfig
from jppo.examples import Pair, render_pair
from jppo.order import RowOrder
from jppo.readers import DataError, Row, Rows, place, read_table
from jppo.tokens import encode, pad, pad_token_id, stop_token_ids
from jppo.types import Prompts

__all__ = [
    "DataError",
    "Pair",
    "PromptData",
    "PromptRow",
    "encode",
    "pad",
    "pad_token_id",
    "read_pairs",
    "read_rows",
    "stop_token_ids",
]

PromptRow = Prompt | Row  # a text, a chat, or either in a dict with other columns


def read_rows(path: str | Path, columns: Sequence[str] = ()) -> Rows:
    """Rows of a table (`readers.read_table`), each with at least these string columns.

    Raises DataError naming file, row and column.
    """
    rows = read_table(path)
    for i, row in enumerate(rows):
        for column in columns:
            if not isinstance(row.get(column), str):
                raise DataError(
                    f"{place(rows, i)}: column {column!r} must be a string, got"
                    f" {row.get(column)!r}; the row has {sorted(row)}"
                )
    return rows


def read_pairs(path: str | Path, tokenizer: Any = None) -> list[Pair]:
    """Preference pairs of a table: texts, or chats, for which a tokenizer is needed.

    The forms of a row are those of `examples.render_pair`.
    """
    rows = read_table(path)
    return [render_pair(tokenizer, row, place(rows, i)) for i, row in enumerate(rows)]


def _fits(ids: Sequence[int], limit: int, where: str, cfg: DataConfig) -> bool:
    if not ids:
        raise DataError(f"{where} is empty: it has no tokens")
    if len(ids) > limit and cfg.overlong == "error":
        raise DataError(
            f"{where} has {len(ids)} tokens, the limit is {limit}:"
            " raise data.max_prompt_tokens, lower sampling.max_new_tokens,"
            " or set data.overlong=drop"
        )
    return len(ids) <= limit


class PromptData:
    """Tokenised prompts with the columns that travel on to the reward function."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        tokenizer: Any,
        cfg: DataConfig,
        *,
        pad_id: int,
        room: int,
        seed: int,
    ):
        """rows: texts, lists of messages, or dicts that hold one beside other columns.

        The column is `data.column`, or `messages` where no row has that. Messages are
        written by the tokenizer's chat template, up to the assistant's turn.
        room: most prompt tokens that the model's window leaves for a prompt.
        """
        if isinstance(rows, (str, bytes, Path)):
            raise DataError(f"prompts must be a list of strings, got {rows!r}")
        if not rows:
            raise DataError("the list of prompts is empty")
        table = [r if isinstance(r, dict) else {cfg.column: r} for r in rows]
        self.column = cfg.column
        if all(cfg.column not in row and "messages" in row for row in table):
            self.column = "messages"
        if room < 1:
            raise DataError(
                "sampling.max_new_tokens leaves no room for a prompt in the model's"
                f" window: {room} tokens"
            )
        places = [place(rows, i, "prompt") for i in range(len(table))]
        shown = [
            self._text(r, tokenizer, w) for r, w in zip(table, places, strict=True)
        ]
        ids = encode(tokenizer, shown)
        limit = min(cfg.max_prompt_tokens or room, room)
        keep = [i for i, where in enumerate(places) if _fits(ids[i], limit, where, cfg)]
        self.dropped = len(table) - len(keep)
        if not keep:
            raise DataError(
                f"all {self.dropped} prompts are longer than {limit} tokens"
            )
        self.rows: list[Row] = [table[i] for i in keep]
        self.ids: list[list[int]] = [list(ids[i]) for i in keep]
        self._shown = [shown[i] for i in keep]
        self.names = sorted({k for row in self.rows for k in row} - {self.column})
        self.pad_id = pad_id
        self.width = min(cfg.max_prompt_tokens or max(map(len, self.ids)), limit)
        self._order = RowOrder(len(keep), seed=seed, shuffle=cfg.shuffle)

    def _text(self, row: Row, tokenizer: Any, where: str) -> str:
        prompt = row.get(self.column)
        if not isinstance(prompt, str) and not is_chat(prompt):
            raise DataError(
                f"{where}: column {self.column!r} must be a string or a list of"
                f" messages, got {prompt!r}; the row has {sorted(row)}"
            )
        return render_prompt(tokenizer, prompt, where)

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, cursor: int, count: int) -> list[int]:
        """Indices of `count` rows from `cursor`, rows already drawn in this run."""
        return self._order.rows(cursor, count)

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
        """The other columns of these rows, for the reward function.

        All that any row has (`names`), None where a row has no value.
        """
        return {name: [self.rows[i].get(name) for i in indices] for name in self.names}

    def prompts(self, indices: Sequence[int]) -> list[Any]:
        """The prompts as they were given, texts or messages: for reward functions."""
        return [self.rows[i][self.column] for i in indices]

    def texts(self, indices: Sequence[int]) -> list[str]:
        """The prompts as the policy reads them: for people."""
        return [self._shown[i] for i in indices]

    def batches(self, size: int) -> Iterator[tuple[list[int], Prompts]]:
        """One pass in order, the last batch filled with weight-0 rows (evaluation)."""
        for start in range(0, len(self), size):
            indices = list(range(start, min(start + size, len(self))))
            yield indices, self.batch(indices, size)
