"""The order of rows: whole passes, any cursor, any number of hosts."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.order import RowOrder

SIZES = st.integers(1, 12)
MANY = settings(max_examples=25, deadline=None)


@MANY
@given(SIZES, st.integers(1, 20), st.booleans(), st.integers(0, 2**40))
def test_each_row_comes_once_a_pass(n, batch, shuffle, seed):
    order = RowOrder(n, seed=seed, shuffle=shuffle)
    stream = [
        row for k in range(-(-3 * n // batch)) for row in order.rows(k * batch, batch)
    ]
    for start in range(0, len(stream) - n + 1, n):
        assert sorted(stream[start : start + n]) == list(range(n))


@MANY
@given(SIZES, st.integers(0, 40), st.integers(0, 20), st.integers(0, 5))
def test_a_cursor_is_the_whole_checkpoint(n, cursor, count, seed):
    whole = RowOrder(n, seed=seed).rows(0, cursor + count)
    assert RowOrder(n, seed=seed).rows(cursor, count) == whole[cursor:]


@MANY
@given(SIZES, st.integers(0, 30), st.integers(0, 20), st.integers(1, 6))
def test_the_hosts_together_hold_the_global_batch(n, cursor, count, hosts):
    order = RowOrder(n, seed=1)
    parts = [order.of_host(cursor, count, host, hosts) for host in range(hosts)]
    assert sum(parts, []) == order.rows(cursor, count)
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_passes_and_seeds_have_orders_of_their_own():
    first, second = (RowOrder(50, seed=0).rows(i * 50, 50) for i in (0, 1))
    other = RowOrder(50, seed=1).rows(0, 50)
    # seed 1 is not seed 0 one pass later, which Grain's own seeds would be
    assert len({tuple(order) for order in (first, second, other, range(50))}) == 4
    assert RowOrder(3, shuffle=False).rows(2, 5) == [2, 0, 1, 2, 0]


def test_every_row_may_come_first():
    """Four rounds of a cipher, but no visible pattern over seeds."""
    firsts = [RowOrder(4, seed=seed).rows(0, 1)[0] for seed in range(200)]
    counts = [firsts.count(row) for row in range(4)]
    assert sum((c - 50) ** 2 / 50 for c in counts) < 16.3  # χ², p = 0.001


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="at least one row, got 0"):
        RowOrder(0)
    with pytest.raises(ValueError, match="host 2 is not one of 2"):
        RowOrder(3).of_host(0, 4, 2, 2)
    assert len(RowOrder(3)) == 3


def test_grain_comes_late_and_without_warnings():
    code = (
        "import sys, jppo, jppo.data, jppo.loop\n"
        "assert not {'grain', 'pyarrow'} & set(sys.modules)\n"
        "from jppo.order import RowOrder\n"
        "assert sorted(RowOrder(3, seed=0).rows(0, 3)) == [0, 1, 2]\n"
        "assert 'grain' in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
