"""The order in which rows are seen: random access by one integer, through Grain.

Row number `cursor + i` of an endless stream follows from the seed and that number
alone. So an integer is the whole checkpoint, and any host can find its own part.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


class RowOrder:
    """An endless order of `n` rows: pass after pass, each row once a pass.

    No row is ever dropped. A batch that reaches the end of a pass goes on into the
    next one, which is in a new order; so it is with a batch larger than the data.
    """

    def __init__(self, n: int, *, seed: int = 0, shuffle: bool = True):
        """shuffle=False: every pass is 0 … n − 1."""
        if n < 1:
            raise ValueError(f"an order needs at least one row, got {n}")
        self.n, self.seed, self.shuffle = n, seed, shuffle

    def __len__(self) -> int:
        """Rows of one pass."""
        return self.n

    @functools.cached_property
    def _stream(self) -> Any:
        from grain import MapDataset  # half a second: not with `import jppo`

        rows = MapDataset.source(range(self.n))
        if self.shuffle:
            # Grain shuffles pass k with seed + k, so neighbouring seeds would have
            # the same passes, one later.
            mixed = np.random.SeedSequence(self.seed).generate_state(1)[0]
            rows = rows.shuffle(seed=int(mixed))
        return rows.repeat()

    def rows(self, cursor: int, count: int) -> list[int]:
        """`count` row numbers from place `cursor` of the stream on.

        The next call goes on from `cursor + count`.
        """
        return [int(self._stream[i]) for i in range(cursor, cursor + count)]

    def of_host(self, cursor: int, count: int, host: int, hosts: int) -> list[int]:
        """The part of `rows(cursor, count)` that one of `hosts` processes loads.

        Parts are contiguous and differ by one row at most. In the order of the hosts
        they are exactly the global batch, however many hosts there are.
        """
        if not 0 <= host < hosts:
            raise ValueError(f"host {host} is not one of {hosts}")
        first, end = host * count // hosts, (host + 1) * count // hosts
        return self.rows(cursor + first, end - first)
