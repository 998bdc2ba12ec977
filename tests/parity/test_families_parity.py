"""Every family against transformers, live, and the table of docs/families.md."""

import pytest
from families_table import COLUMNS, LIMIT, documented, measure
from tiny_families import FAMILIES

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # torch's and transformers' own
]


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    pytest.importorskip("torch")
    for column, value in measure(name).items():
        if isinstance(value, bool):
            assert value, column
        elif value is None:
            assert documented()[name][column] == "no class"
        else:
            assert value <= LIMIT, column


def test_the_page_has_every_family_and_nothing_that_fails():
    table = documented()
    assert list(table) == list(FAMILIES)
    for name, cells in table.items():
        assert list(cells) == list(COLUMNS)
        for cell in cells.values():
            fine = cell in ("bit-equal", "no class")
            assert fine or float(cell.removeprefix("≤ ")) <= LIMIT, (name, cell)
