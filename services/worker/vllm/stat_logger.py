"""StatLogger: vLLM's statistics of each step, passed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class StatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Passes vLLM's statistics of each step of each rank on."""

    def __init__(self) -> None:
        self.record_step: Callable[[int, Any, Any], None] | None = None
        """Gets the number of the rank, and vLLM's SchedulerStats and IterationStats."""

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002 - vLLM's signature
        engine_idx: int = 0,
    ) -> None:
        if self.record_step is not None:
            self.record_step(engine_idx, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        pass
