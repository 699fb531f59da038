"""Blocks whose fragments lie in one array, as tests and benchmarks make them."""

from __future__ import annotations

from services.worker.transfer.block_shape import BlockShape


def layer_major(at: int, fragments: int, fragment_bytes: int, slots: int) -> BlockShape:
    """Return the shape of one array (fragments, slots, fragment_bytes) at the address `at`."""
    regions = tuple(at + index * slots * fragment_bytes for index in range(fragments))
    return BlockShape(regions, fragment_bytes, fragment_bytes, slots)
