"""A planner of splits for tests: an 8B Llama's, on an H100."""

from __future__ import annotations

from services.worker.native.cuda.splits import SplitPlanner


def llama_8b(*, window: int = 0) -> SplitPlanner:
    """Make a planner for 8 KV heads and 132 multiprocessors."""
    return SplitPlanner(blocks_at_once=3 * 132, blocks_of_split=8, most=1024, window=window)
