"""How a GPU's memory is shared out, and which batches are captured as CUDA graphs."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.config import CudaConfig
from services.worker.native.cuda.capacity import (
    MARGIN_BYTES,
    MOST_BLOCKS,
    OUTSIDE_BYTES,
    GpuRoom,
    capacity,
    graph_rows,
    weight_bytes,
)
from shared.errors import ModelError

GIB = 1 << 30
ROOM = GpuRoom(total_bytes=140 * GIB, free_bytes=139 * GIB, weight_bytes=16 * GIB, step_bytes=GIB)
CROWDED = GpuRoom(140 * GIB, 10 * GIB, 16 * GIB, GIB)
BLOCK_BYTES = 2 << 20


def blocks(room: GpuRoom = ROOM, *, asked: int = 0, kv_bytes: int = 0, share: float = 0.9) -> int:
    return capacity(room, blocks=asked, kv_bytes=kv_bytes, share=share, block_bytes=BLOCK_BYTES, model="a model")


def test_a_set_number_of_blocks_is_given_whatever_the_share() -> None:
    assert blocks(asked=7, share=0.01) == 7
    assert blocks(kv_bytes=3 * BLOCK_BYTES + 1, share=0.01) == 3
    assert blocks(asked=7, kv_bytes=3 * BLOCK_BYTES) == 7


def test_without_a_setting_the_share_is_used_up() -> None:
    expected = (int(0.9 * 140 * GIB) - OUTSIDE_BYTES - 17 * GIB) // BLOCK_BYTES
    assert blocks() == expected


def test_two_workers_with_half_of_the_share_fit_together() -> None:
    taken_bytes = blocks(share=0.5) * BLOCK_BYTES + OUTSIDE_BYTES + 17 * GIB
    assert 2 * taken_bytes <= ROOM.total_bytes


def test_memory_of_other_processes_is_left_to_them() -> None:
    shared = GpuRoom(140 * GIB, 40 * GIB, 16 * GIB, GIB)
    assert blocks(shared) == (40 * GIB - MARGIN_BYTES - 17 * GIB) // BLOCK_BYTES


def test_a_tiny_models_blocks_are_bounded() -> None:
    room = GpuRoom(140 * GIB, 139 * GIB, 1 << 20, GIB)
    assert capacity(room, blocks=0, kv_bytes=0, share=0.9, block_bytes=4096, model="tiny") == MOST_BLOCKS


@pytest.mark.parametrize(
    ("room", "asked"),
    [(ROOM, {"asked": 70_000}), (ROOM, {"kv_bytes": 200 * GIB}), (ROOM, {"share": 0.12}), (CROWDED, {})],
)
def test_blocks_that_do_not_fit_are_an_error_with_all_sizes(room: GpuRoom, asked: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"a model: the GPU has no room for [0-9]+ block") as wrong:
        blocks(room, **asked)
    sizes = re.findall("[0-9]+", str(wrong.value))
    assert {str(BLOCK_BYTES), str(16 * GIB), str(GIB), str(140 * GIB), str(room.free_bytes)} <= set(sizes)


def test_bytes_that_hold_no_block_are_an_error() -> None:
    with pytest.raises(ModelError, match="capacity_bytes 100 holds no block"):
        blocks(kv_bytes=100)


@given(
    st.integers(GIB, 200 * GIB), st.floats(0, 1), st.integers(0, 100 * GIB), st.integers(0, 4 * GIB), st.floats(0.01, 1)
)
def test_no_more_blocks_are_given_than_free_memory_holds(
    total_bytes: int, free: float, weights_bytes: int, steps_bytes: int, share: float
) -> None:
    room = GpuRoom(total_bytes, int(free * total_bytes), weights_bytes, steps_bytes)
    try:
        count = blocks(room, share=share)
    except ModelError:
        return
    taken_bytes = count * BLOCK_BYTES + weights_bytes + steps_bytes
    assert count >= 1
    assert taken_bytes + MARGIN_BYTES <= room.free_bytes
    assert taken_bytes + OUTSIDE_BYTES <= share * total_bytes


def test_matrices_are_of_the_element_type_and_vectors_float32() -> None:
    assert weight_bytes({"a": (10, 20), "b": (20,)}, 2) == 400 + 80


def test_the_last_graph_has_rows_for_all_that_may_run() -> None:
    assert graph_rows(CudaConfig(), 1) == (1,)
    assert graph_rows(CudaConfig(), 6) == (1, 2, 4, 6)
    assert graph_rows(CudaConfig(), 20) == (1, 2, 4, 8, 16, 20)
    assert graph_rows(CudaConfig(graph_upper_bound=16), 64) == (1, 2, 4, 8, 16)
    assert graph_rows(CudaConfig(), 300)[-1] == 256
    assert graph_rows(CudaConfig(graph_upper_bound=300), 300)[-3:] == (256, 288, 300)


def test_a_graph_that_no_step_would_use_is_not_captured() -> None:
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


def test_memory_for_loras_is_not_given_to_kv() -> None:
    room = GpuRoom(total_bytes=80 << 30, free_bytes=79 << 30, weight_bytes=16 << 30, step_bytes=2 << 30)
    with_loras = GpuRoom(room.total_bytes, room.free_bytes, room.weight_bytes, room.step_bytes, lora_bytes=1 << 30)
    assert room.kv_bytes(0.9) - with_loras.kv_bytes(0.9) == 1 << 30
    with pytest.raises(ModelError, match=f"LoRAs {1 << 30}"):
        capacity(with_loras, blocks=61, kv_bytes=0, share=0.9, block_bytes=1 << 30, model="m")
    assert capacity(room, blocks=61, kv_bytes=0, share=0.9, block_bytes=1 << 30, model="m") == 61


def test_on_a_gpu_that_is_nearly_full_loras_get_a_small_part_of_what_is_left() -> None:
    assert GpuRoom(80 << 30, 79 << 30, 1 << 30, 1 << 28).lora_bytes_of(512 << 20, 0.9) == 512 << 20
    full = GpuRoom(80 << 30, 4 << 30, 20 << 20, 1 << 30)
    assert 0 < full.lora_bytes_of(512 << 20, 0.9) == full.kv_bytes(0.9) // 8
    assert GpuRoom(80 << 30, 100 << 20, 20 << 20, 280 << 20).lora_bytes_of(512 << 20, 0.9) == 0
