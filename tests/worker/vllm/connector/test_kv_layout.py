"""The bytes that a shape gathers are those of NumPy's slice of the same block."""

from __future__ import annotations

import ctypes
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.transfer.block_shape import BlockShape
from services.worker.vllm.connector.kv_layout import LayoutUnfit, TensorPlace, block_shape, kv_layout
from shared.messages.cards import KvLayout

Array = np.ndarray[Any, Any]
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def place(array: Array) -> TensorPlace:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return TensorPlace(array.ctypes.data, array.shape, strides, array.itemsize)


def places(arrays: list[Array]) -> dict[str, TensorPlace]:
    return {f"model.layers.{index}.attn": place(array) for index, array in enumerate(arrays)}


def gathered(shape: BlockShape, block: int) -> bytes:
    return b"".join(
        ctypes.string_at(region + block * shape.stride_bytes, shape.fragment_bytes) for region in shape.regions
    )


def in_memory_order(array: Array, axis: int, block: int, kernel_blocks: int = 1) -> bytes:
    """Return the block's bytes, with the axes in the order of memory."""
    part = np.take(array, range(block * kernel_blocks, (block + 1) * kernel_blocks), axis)
    order = sorted(range(array.ndim), key=lambda each: (array.shape[each] > 1, array.strides[each]), reverse=True)
    return part.transpose(order).tobytes()


def check(arrays: list[Array], axis: int, blocks: int, kernel_blocks: int = 1) -> BlockShape:
    shape = block_shape(places(arrays), blocks, block_axis=axis)
    shape.validate()
    assert shape.slots == blocks
    for block in range(blocks):
        expected = b"".join(in_memory_order(array, axis, block, kernel_blocks) for array in arrays)
        assert gathered(shape, block) == expected
    return shape


def random(shape: tuple[int, ...], dtype: Any = np.uint16) -> Array:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    drawn: Array = np.random.default_rng(3).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
    return drawn


def in_order(order: str, layers: int, blocks: int, heads: int, tokens: int, content: int) -> list[Array]:
    """Return the views [blocks, heads, tokens, content] of layers in one backing memory, as vLLM 0.32 makes them."""
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": content}
    whole = random(tuple(sizes[axis] for axis in order))
    return list(whole.transpose([order.index(axis) for axis in "LBHNC"]))


@given(
    order=st.sampled_from(ORDERS),
    layers=st.integers(1, 12),
    blocks=st.integers(1, 5),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 4),
)
def test_every_order_of_vllm_gives_each_blocks_bytes(
    order: str, layers: int, blocks: int, heads: int, tokens: int
) -> None:
    arrays = in_order(order, layers, blocks, heads, tokens, 8)
    block_bytes = layers * heads * tokens * 8 * 2
    assert check(arrays, 0, blocks).block_bytes == block_bytes


@given(order=st.permutations(range(4)), extents=st.tuples(*[st.integers(1, 4)] * 4), axis=st.integers(0, 3))
def test_a_dense_tensor_in_any_order_gives_its_blocks(order: list[int], extents: tuple[int, ...], axis: int) -> None:
    array = random(extents).transpose(order)
    blocks = array.shape[axis]
    shape = block_shape({"a": place(array)}, blocks, block_axis=axis)
    parts = [gathered(shape, block) for block in range(blocks)]
    assert parts == [in_memory_order(array, axis, block) for block in range(blocks)]


@given(blocks=st.integers(1, 4), kernel_blocks=st.integers(1, 4), order=st.sampled_from(ORDERS[:3]))
def test_a_block_of_the_scheduler_spans_neighbouring_kernel_blocks(blocks: int, kernel_blocks: int, order: str) -> None:
    arrays = in_order(order, 3, blocks * kernel_blocks, 2, 4, 8)
    check(arrays, 0, blocks, kernel_blocks)


@pytest.mark.parametrize(
    ("order", "fragments"),
    [("LBHNC", 4), ("LBNHC", 4), ("LHBNC", 12), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 12)],
)
def test_the_number_of_fragments_follows_the_order(order: str, fragments: int) -> None:
    assert check(in_order(order, 4, 7, 3, 5, 8), 0, 7).fragments == fragments


def test_keys_and_values_apart_are_two_fragments_a_layer_and_together_one() -> None:
    apart = [random((2, 7, 16, 3, 8)) for _ in range(2)]
    assert check(apart, 1, 7).fragments == 4
    together = [random((7, 2, 16, 3, 8)) for _ in range(2)]
    assert check(together, 0, 7).fragments == 2
    assert check([random((7, 16, 576), np.uint8)], 0, 7).fragments == 1, "MLA"


def test_the_block_axis_is_found_by_its_extent() -> None:
    apart = places([random((2, 7, 16, 3, 8))])
    assert block_shape(apart, 7) == block_shape(apart, 7, block_axis=1)
    kernel = places([random((14, 3, 5, 8))])
    assert block_shape(kernel, 7) == block_shape(kernel, 7, block_axis=0)


def test_two_axes_of_the_same_extent_are_refused_until_one_is_stated() -> None:
    array = random((2, 2, 16, 3, 8))
    with pytest.raises(LayoutUnfit, match=r"axes \[0, 1\] .* state block_axis"):
        block_shape({"a": place(array)}, 2)
    for axis in (0, 1):
        check([array], axis, 2)


def test_layers_are_in_the_order_of_their_numbers_and_a_shared_tensor_counts_once() -> None:
    arrays = [random((5, 2, 4, 8)) for _ in range(11)]
    named = places(arrays)
    backwards = dict(reversed(named.items())) | {"model.layers.11.attn": named["model.layers.3.attn"]}
    shape = block_shape(backwards, 5)
    assert shape == block_shape(named, 5)
    assert gathered(shape, 2) == b"".join(array[2].tobytes() for array in arrays)


A = TensorPlace(4096, (4, 8), (8, 1), 2)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (TensorPlace(8192, (4, 8), (16, 1), 2), "32 bytes apart, those of a.0 16"),
        (TensorPlace(8192, (4, 4), (8, 1), 2), "fragments have 8 bytes, those of a.0 16"),
        (TensorPlace(4100, (4, 8), (8, 1), 2), "overlap those of another layer"),
        (TensorPlace(8192, (4, 8), (4, 1), 2), "its elements overlap"),
        (TensorPlace(8192, (4, 8), (8, 0), 2), "its elements overlap"),
        (TensorPlace(8192, (4, 8), (-8, 1), 2), "its elements overlap"),
        (TensorPlace(8192, (4, 0), (8, 1), 2), "it is empty"),
        (TensorPlace(8192, (), (), 2), "it is empty"),
        (TensorPlace(8192, (4, 8), (8,), 2), "2 axes have 1 strides"),
        (TensorPlace(8192, (5, 7), (7, 1), 2), "does not count 4 blocks"),
        (TensorPlace(8192, (4, 1 << 17), (1 << 18, 2), 2), "more than 65536 pieces"),
    ],
)
def test_what_does_not_fit_names_the_layer_and_the_reason(second: TensorPlace, reason: str) -> None:
    with pytest.raises(LayoutUnfit, match=reason) as caught:
        block_shape({"a.0": A, "a.1": second}, 4, block_axis=0)
    assert caught.value.layer == "a.1"


def test_no_tensors_no_blocks_no_such_axis_and_no_axis_that_counts_are_refused() -> None:
    for named, blocks, axis, reason in (
        ({}, 4, 0, "no tensors"),
        ({"a": A}, 0, 0, "0 blocks"),
        ({"a": A}, 4, 2, "no axis 2"),
        ({"a": A}, 3, None, "no axis of shape"),
    ):
        with pytest.raises(LayoutUnfit, match=reason):
            block_shape(named, blocks, block_axis=axis)


def described(arrays: list[Array], blocks: int, **changed: Any) -> KvLayout:
    facts: dict[str, Any] = {
        "dtype": "bfloat16",
        "backend": "FLASH_ATTN 0.32",
        "kv_heads": 2,
        "head_dim": 4,
        "block_size": 4,
    }
    return kv_layout(places(arrays), blocks, block_axis=0, **(facts | changed))


def test_descriptions_are_equal_only_for_the_same_bytes_at_the_same_place() -> None:
    first = described(in_order("LBHNC", 3, 5, 2, 4, 8), 5)
    assert first == described(in_order("LBHNC", 3, 9, 2, 4, 8), 9), "whatever the number of blocks is"
    assert first == described(in_order("BLHNC", 3, 5, 2, 4, 8), 5), "layers apart or together: the same in the pool"
    assert first.block_bytes == 3 * 2 * 4 * 8 * 2
    others = [
        described(in_order("LBNHC", 3, 5, 2, 4, 8), 5),
        described(in_order("LBHNC", 2, 5, 2, 4, 8), 5),
        described(in_order("LBHNC", 3, 5, 4, 2, 8), 5),
        described(in_order("LBHNC", 3, 5, 2, 8, 8), 5),
        described(in_order("LBHNC", 3, 10, 2, 4, 8), 5),
        described(in_order("LBHNC", 3, 5, 2, 4, 8), 5, dtype="float16"),
        described(in_order("LBHNC", 3, 5, 2, 4, 8), 5, backend="FLASHINFER 0.32"),
        described(in_order("LBHNC", 3, 5, 2, 4, 8), 5, backend="FLASH_ATTN 0.33"),
        described(in_order("LBHNC", 3, 5, 2, 4, 8), 5, block_size=8),
        KvLayout("bfloat16", 3, 2, 4, 4),
    ]
    digests = {layout.digest for layout in (first, *others)}
    assert len(digests) == 1 + len(others)


def test_every_order_of_axes_has_its_own_description() -> None:
    forms = {described([random((5, 2, 3, 4)).transpose(0, *order)], 5).form for order in permutations((1, 2, 3))}
    assert len(forms) == 6


def test_a_recorded_form_stays_the_same() -> None:
    """Blocks on disk have this name. If it must change, so must `_FORM`: the old blocks are then not found."""
    assert described(in_order("LBHNC", 3, 5, 2, 4, 8), 5) == KvLayout(
        dtype="bfloat16",
        layers=3,
        kv_heads=2,
        head_dim=4,
        block_size=4,
        form="7a1982b0f7d5d08f",
        form_bytes=384,
    )
    assert described(in_order("LBNHC", 3, 5, 2, 4, 8), 5).form == "746f5daed9d34c24"
    assert described(in_order("LBHNC", 3, 5, 2, 4, 8), 5).digest == "4a2a2b8927d34d3e"
