"""The sizes of a server's cache, as vLLM's /metrics shows them. Pure."""

from __future__ import annotations

import re


def read_sizes(metrics: str) -> tuple[int, int, int]:
    """Return (tokens of a block, number of blocks, data-parallel ranks) of vLLM's metrics; 0 is unknown."""
    lines = re.findall(r"^vllm:cache_config_info\{.*", metrics, re.MULTILINE)
    sizes = {name: int(size) for name, size in re.findall(r'\b(block_size|num_gpu_blocks)="(\d{1,9})"', "".join(lines))}
    return sizes.get("block_size", 0), sizes.get("num_gpu_blocks", 0), len(lines)
