"""Which batches are captured."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from services.worker.config import CudaConfig
from services.worker.native.cuda.graph_rows import graph_rows


def test_the_last_graph_takes_all_that_may_run() -> None:
    assert graph_rows(CudaConfig(), 1) == (1,)
    assert graph_rows(CudaConfig(), 6) == (1, 2, 4, 6)
    assert graph_rows(CudaConfig(), 20) == (1, 2, 4, 8, 16, 20)
    assert graph_rows(CudaConfig(graph_upper_bound=16), 64) == (1, 2, 4, 8, 16)
    assert graph_rows(CudaConfig(), 300)[-1] == 256
    assert graph_rows(CudaConfig(graph_upper_bound=300), 300)[-3:] == (256, 288, 300)


def test_what_no_step_would_take_is_not_captured() -> None:
    assert graph_rows(CudaConfig(graph_lower_bound=3), 16) == (4, 8, 16)
    assert graph_rows(CudaConfig(graph_lower_bound=9), 16) == (16,)
    assert graph_rows(CudaConfig(graph_lower_bound=17), 16) == ()
    assert graph_rows(CudaConfig(graphs=False), 16) == ()


@given(st.integers(1, 400), st.integers(0, 400), st.integers(1, 400))
def test_rows_ascend_and_little_is_padded(lower: int, more: int, max_running: int) -> None:
    rows = graph_rows(CudaConfig(graph_lower_bound=lower, graph_upper_bound=lower + more), max_running)
    assert list(rows) == sorted(set(rows))
    upper = min(lower + more, max_running)
    for running in range(lower, upper + 1):
        taken = rows[bisect_left(rows, running)]
        assert taken - running <= max(7, running // 8)
