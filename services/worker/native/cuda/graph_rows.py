"""Which batches are captured as CUDA graphs. Pure."""

from __future__ import annotations

from services.worker.config import CudaConfig


def graph_rows(settings: CudaConfig, max_running: int) -> tuple[int, ...]:
    """Rows of the graphs, ascending: 1, 2, 4, then every 8 and above 256 every 32, up to the smaller of
    `graph_upper_bound` and `max_running`, which is the last one itself. Those that only steps below
    `graph_lower_bound` would take are left out."""
    lower, upper = settings.graph_lower_bound, min(settings.graph_upper_bound, max_running)
    if not settings.graphs or upper < lower:
        return ()
    return (*(rows for rows in (1, 2, 4, *range(8, 257, 8), *range(288, upper, 32)) if lower <= rows < upper), upper)
