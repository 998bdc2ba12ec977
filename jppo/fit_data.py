"""Encoded examples to batches: texts (packed or not), and pairs of texts.

A source has `len` rows and makes a batch of any of them: right-padded NumPy records
of one shape, filled up with rows that count nowhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jppo.examples import Example, PairExample
from jppo.readers import DataError
from jppo.types import PairBatch, RankedBatch, TokenBatch


@runtime_checkable
class Source(Protocol):
    """Rows that a model is fitted to."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], size: int, draw: int) -> Any:
        """A record of `size` rows, of which those after `rows` count nowhere.

        draw: number of the batch in the run, for sources that choose at random.
        """
        ...


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Numbers of texts that share a row: each into the fullest row with room.

    Longest first (best-fit decreasing), so the rows are within 11/9 of the fewest.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free slots, bin), sorted
    for i in order:
        at = bisect.bisect_left(room, (lengths[i], -1))
        if at == len(room):
            bins.append([i])
            bisect.insort(room, (width - lengths[i], len(bins) - 1))
            continue
        free, chosen = room.pop(at)
        bins[chosen].append(i)
        bisect.insort(room, (free - lengths[i], chosen))
    return bins


def fitting(
    lengths: Sequence[int], limit: int, overlong: str, places: Sequence[str]
) -> list[int]:
    """Numbers of the rows that fit into `limit` tokens.

    Raises DataError naming the row where `overlong` is "error", and when none fits.
    """
    kept = [i for i, n in enumerate(lengths) if n <= limit]
    if overlong == "error" and len(kept) < len(lengths):
        i = next(i for i, n in enumerate(lengths) if n > limit)
        raise DataError(
            f"{places[i]} has {lengths[i]} tokens, the limit is {limit}: raise"
            " data.max_tokens, or set data.overlong=drop"
        )
    if not kept:
        raise DataError(f"all {len(lengths)} rows are longer than {limit} tokens")
    return kept


class TextSource:
    """Examples of supervised training, one a row, or several where packed."""

    def __init__(
        self, examples: Sequence[Example], *, width: int, pad_id: int, packing: bool
    ):
        self.examples, self.pad_id = examples, pad_id
        lengths = [len(e.ids) for e in examples]
        self.bins = (
            pack(lengths, width) if packing else [[i] for i in range(len(examples))]
        )
        self.width = width if packing else max(lengths)

    def __len__(self) -> int:
        return len(self.bins)

    def batch(self, rows: Sequence[int], size: int, draw: int) -> TokenBatch:
        shape = (size, self.width)
        tokens = np.full(shape, self.pad_id, np.int32)
        valid, trained = np.zeros(shape, bool), np.zeros(shape, bool)
        segments = np.zeros(shape, np.int32)
        for r, row in enumerate(rows):
            start = 0
            for number, i in enumerate(self.bins[row], 1):
                ids, marks = self.examples[i]
                at = slice(start, start + len(ids))
                tokens[r, at], trained[r, at], valid[r, at] = ids, marks, True
                segments[r, at] = number
                start += len(ids)
        host: tuple[Any, ...] = tokens, valid, trained, segments
        return TokenBatch(*host)


class _Pairs:
    """Encoded preferences: row i of a batch is 2i (chosen) and 2i + 1 (rejected)."""

    def __init__(self, pairs: Sequence[PairExample], *, pad_id: int):
        self.pairs, self.pad_id = pairs, pad_id
        self.width = max(max(len(p.chosen.ids), len(p.rejected.ids)) for p in pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def _texts(self, rows: Sequence[int], size: int):
        """(tokens, valid, trained) of both texts of each pair, `[2 · size, width]`."""
        shape = (2 * size, self.width)
        tokens = np.full(shape, self.pad_id, np.int32)
        valid, trained = np.zeros(shape, bool), np.zeros(shape, bool)
        texts = [
            e for i in rows for e in (self.pairs[i].chosen, self.pairs[i].rejected)
        ]
        for r, (ids, marks) in enumerate(texts):
            tokens[r, : len(ids)], trained[r, : len(ids)] = ids, marks
            valid[r, : len(ids)] = True
        return tokens, valid, trained


class PairSource(_Pairs):
    """Pairs for DPO."""

    def batch(self, rows: Sequence[int], size: int, draw: int) -> PairBatch:
        weight, margin = np.zeros(2 * size, np.float32), np.zeros(2 * size, np.float32)
        weight[: 2 * len(rows)] = 1.0
        margin[: 2 * len(rows)] = np.repeat([self.pairs[i].margin for i in rows], 2)
        host: tuple[Any, ...] = (*self._texts(rows, size), weight, margin)
        return PairBatch(*host)


class RankedSource(_Pairs):
    """Pairs for a reward model, which reads each text at its last token."""

    def batch(self, rows: Sequence[int], size: int, draw: int) -> RankedBatch:
        tokens, valid, _ = self._texts(rows, size)
        better, margin = np.zeros((2, 2 * size, 2 * size))
        for r, i in enumerate(rows):
            better[2 * r, 2 * r + 1], margin[2 * r, 2 * r + 1] = 1, self.pairs[i].margin
        last = np.maximum(valid.sum(-1) - 1, 0)[:, None].astype(np.int32)
        host: tuple[Any, ...] = (
            tokens,
            valid,
            last,
            better.astype(bool),
            margin.astype(np.float32),
        )
        return RankedBatch(*host)
