"""The arithmetic of the pool file, and invalid headers."""

from __future__ import annotations

from struct import pack

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.pool.format import (
    ALIGN_BYTES,
    HEADER_BYTES,
    LEAST_BYTES,
    MAGIC,
    MOST_BYTES,
    PAGE_BYTES,
    Arena,
    PoolGeometry,
    PoolUnfit,
    parse,
    usable,
)

SIZES = st.integers(LEAST_BYTES // ALIGN_BYTES, MOST_BYTES // ALIGN_BYTES).map(lambda units: units * ALIGN_BYTES)
MIB = 1 << 20


@given(SIZES)
def test_a_file_that_says_what_it_is_is_read(file_bytes: int) -> None:
    geometry = PoolGeometry.of(file_bytes)
    assert parse(geometry.header() + bytes(100), file_bytes) == geometry
    assert geometry.generations_at + 8 * geometry.pages <= geometry.slots_at
    assert geometry.slots_at + PAGE_BYTES * geometry.pages == file_bytes
    assert geometry.pages > 0


@given(SIZES, st.integers(1, 9), st.integers(1, 64 * MIB))
def test_arenas_lie_in_the_file_and_share_neither_bytes_nor_generations(
    file_bytes: int, count: int, block_bytes: int
) -> None:
    geometry = PoolGeometry.of(file_bytes)
    try:
        arenas = [geometry.arena(index, count, block_bytes) for index in range(count)]
    except PoolUnfit:
        assert (file_bytes - geometry.slots_at) // count < block_bytes + PAGE_BYTES + ALIGN_BYTES
        return
    bytes_end, generations_end = geometry.slots_at, geometry.generations_at
    for arena in arenas:
        geometry.check(arena)
        assert arena.slots > 0
        assert arena.slot_bytes >= block_bytes
        assert arena.offset % ALIGN_BYTES == arena.slot_bytes % PAGE_BYTES == arena.generations % 8 == 0
        assert arena.offset >= bytes_end
        assert arena.generations >= generations_end
        bytes_end, generations_end = arena.offset + arena.size_bytes, arena.generations + 8 * arena.slots
    assert bytes_end <= file_bytes
    assert generations_end <= geometry.slots_at


@given(st.binary(max_size=2 * HEADER_BYTES), SIZES)
def test_bytes_that_are_no_header_are_refused(header: bytes, file_bytes: int) -> None:
    with pytest.raises(PoolUnfit):
        parse(header, file_bytes)


@given(
    st.sampled_from([0, 1, 2, 1 << 31]),
    st.sampled_from([0, PAGE_BYTES, 1 << 31]),
    st.lists(st.integers(0, (1 << 64) - 1), min_size=4, max_size=4),
    SIZES,
)
def test_a_header_with_other_numbers_is_refused(version: int, page: int, numbers: list[int], file_bytes: int) -> None:
    header = pack("<8sIIQQQQ", MAGIC, version, page, *numbers)
    with pytest.raises(PoolUnfit):
        parse(header, file_bytes)
    stated = pack("<8sIIQQQQ", MAGIC, version, page, file_bytes, *numbers[1:])
    with pytest.raises(PoolUnfit):
        parse(stated, file_bytes)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_every_bit_of_a_header_counts(bit: int) -> None:
    header = bytearray(PoolGeometry.of(MIB).header())
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PoolUnfit):
        parse(bytes(header), MIB)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "the header has only 0 bytes"),
        (bytes(HEADER_BYTES), "not a pool"),
        (
            PoolGeometry.of(MIB).header().replace(b"\x01\x00\x00\x00", b"\x02\x00\x00\x00", 1),
            "version 2; this program has version 1",
        ),
        (PoolGeometry.of(2 * MIB).header(), "a pool of 2097152 bytes in a file of 1048576"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_header(header: bytes, said: str) -> None:
    with pytest.raises(PoolUnfit, match=said):
        parse(header, MIB)


@pytest.mark.parametrize("file_bytes", [-ALIGN_BYTES, 0, ALIGN_BYTES, LEAST_BYTES + 1, MOST_BYTES + ALIGN_BYTES])
def test_no_pool_has_such_a_size(file_bytes: int) -> None:
    with pytest.raises(PoolUnfit, match=f"{file_bytes} bytes"):
        PoolGeometry.of(file_bytes)


def test_a_size_is_rounded_down_to_what_a_pool_can_have() -> None:
    assert usable(MIB + 5) == MIB
    with pytest.raises(PoolUnfit):
        usable(ALIGN_BYTES)


FAR = st.integers(-(1 << 70), 1 << 70)


@given(FAR, FAR, FAR, FAR)
def test_an_arena_that_was_made_up_is_refused_or_lies_in_the_file(
    offset: int, slot_bytes: int, slots: int, generations: int
) -> None:
    geometry = PoolGeometry.of(MIB)
    arena = Arena(offset, slot_bytes, slots, generations)
    with pytest.raises(PoolUnfit):
        geometry.check(arena)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 0},
        {"offset": PAGE_BYTES},
        {"offset": 4 * ALIGN_BYTES},
        {"slot_bytes": 0},
        {"slot_bytes": -PAGE_BYTES},
        {"slot_bytes": PAGE_BYTES + 1},
        {"slot_bytes": MIB},
        {"slots": 0},
        {"slots": -1},
        {"slots": 16},
        {"generations": 0},
        {"generations": PAGE_BYTES + 1},
        {"generations": PAGE_BYTES + 8},
    ],
)
def test_an_arena_with_one_wrong_number_is_refused(change: dict[str, int]) -> None:
    geometry = PoolGeometry.of(MIB)
    arena = geometry.arena(0, 1, 16 * PAGE_BYTES)
    assert arena.slots == 15
    with pytest.raises(PoolUnfit, match="does not lie in a pool of 1048576 bytes"):
        geometry.check(msgspec.structs.replace(arena, **change))


def test_a_block_larger_than_an_arena_is_refused() -> None:
    geometry = PoolGeometry.of(MIB)
    assert geometry.arena(0, 1, 15 * ALIGN_BYTES).slots == 1
    with pytest.raises(PoolUnfit, match="larger than an arena of 458752"):
        geometry.arena(1, 2, 8 * ALIGN_BYTES)
