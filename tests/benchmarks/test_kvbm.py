from __future__ import annotations

from pathlib import Path

from benchmarks import kvbm_copies, kvbm_fetch, kvbm_first, kvbm_steps
from benchmarks.kvbm_steps import Use


def test_copies_have_a_row_for_each_size_of_blocks(tmp_path: Path) -> None:
    rows = kvbm_copies.measure(tmp_path, 16 << 20)
    assert [row.block_kib for row in rows] == list(kvbm_copies.BLOCK_KIB)
    assert all(row.stored > 0 < row.loaded for row in rows)
    worst = min(row.stored for row in rows)
    assert kvbm_copies.goals(rows)[0].value == worst


def test_fetches_are_measured_against_a_kvbm_of_its_own() -> None:
    fetch, alone = kvbm_fetch.measure(8, 10)
    assert fetch.what == "fetch of 8 blocks"
    assert fetch.median_ms > alone.least_ms > 0


def test_storing_that_slows_a_step_by_more_than_three_hundredths_misses_the_goal() -> None:
    pairs = [(Use(own, 1, 1), Use(own * slower, 1, 1)) for own, slower in ((10, 1.0), (20, 1.04), (30, 1.2))]
    row = kvbm_steps._row("own", pairs)
    assert (row.without_ms, row.ratio, row.least, row.most) == (20, 1.04, 1.0, 1.2)
    assert [goal.met for goal in kvbm_steps.goals([row])] == [False]


def test_a_first_token_is_compared_with_its_bytes_tier_by_tier() -> None:
    took = {"host": ((0.074, 0.020), 0.050), "disk": ((0.270, 0.020), 0.100)}
    rows = [kvbm_first._row("host", *took["host"]), kvbm_first._row("disk", *took["disk"])]
    assert [(round(row.first_ms), round(row.alone_ms)) for row in rows] == [(54, 50), (250, 100)]
    assert [(goal.value, goal.met) for goal in kvbm_first.goals(rows)] == [(rows[0].ratio, True), (2.5, False)]
