from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.transfer.block_checksum import FACTOR, STEP, block_checksum

MASK = (1 << 64) - 1
BOUNDARY = 32768 * 8
"""The bytes that are summed at once."""


def slow(block: bytes) -> int:
    """Compute the checksum by the formula in the module's docstring."""
    total = 0
    for index in range(0, len(block), 8):
        word = int.from_bytes(block[index : index + 8].ljust(8, b"\0"), "little")
        term = ((word ^ (index // 8 + 1) * STEP & MASK) * FACTOR) & MASK
        total += term ^ term >> 32
    return total & MASK


@given(st.binary(max_size=200))
def test_the_checksum_equals_a_plain_loops(block: bytes) -> None:
    assert block_checksum(memoryview(block)) == slow(block)


@pytest.mark.parametrize("size", [BOUNDARY - 8, BOUNDARY, BOUNDARY + 1, 2 * BOUNDARY + 13])
def test_the_checksum_of_a_block_summed_in_parts_equals_a_plain_loops(size: int) -> None:
    block = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert block_checksum(memoryview(block)) == slow(block)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_changed_bit_changes_the_checksum(block: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    other = bytearray(block)
    other[bit // 8] ^= 1 << bit % 8
    assert block_checksum(memoryview(block)) != block_checksum(memoryview(other))


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=12, unique=True), st.data())
def test_another_order_of_words_changes_the_checksum(words: list[bytes], data: st.DataObject) -> None:
    other = data.draw(st.permutations(words))
    same = block_checksum(memoryview(b"".join(words))) == block_checksum(memoryview(b"".join(other)))
    assert same == (words == other)
