"""deploy/local/table.py: columns, ages and sizes."""

from __future__ import annotations

import pytest

from deploy.local.table import age, narrowed, size, table


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_at_their_last_word() -> None:
    assert table("A  LONG  B", [("wide", "x", None)]) == "A     LONG  B\nwide  x"


@pytest.mark.parametrize(("columns", "head"), [(10, "A  LONG  B"), (9, "A  LONG"), (6, "A"), (0, "A")])
def test_a_table_goes_without_spare_columns_until_it_fits(columns: int, head: str) -> None:
    shown = narrowed("A  LONG  B", [("x", None, 3)], columns, ("B", "LONG"))
    assert shown.splitlines()[0] == head


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0s"), (59.4, "59s"), (60, "1m"), (7199, "1h"), (86400 * 3 + 1, "3d")]
)
def test_an_age_has_its_largest_unit(seconds: float, said: str) -> None:
    assert age(seconds) == said


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (45_600_000, "45.6 MB"), (999_700, "1 MB"), (3e12, "3000 GB")],
)
def test_a_size_has_its_largest_unit(size_bytes: float, said: str) -> None:
    assert size(size_bytes) == said
