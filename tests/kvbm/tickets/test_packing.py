from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvbm.tickets.errors import BadRequest
from services.kvbm.tickets.packing import LABEL_CHARS, pack_slots, to_contents, unpack_keys, unpack_slots
from shared.blocks import Content
from shared.messages.kvbm import StoreBlock


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_slots_are_little_endian_and_come_back(slots: list[int]) -> None:
    assert pack_slots(slots) == b"".join(slot.to_bytes(4, "little") for slot in slots)
    assert unpack_slots(pack_slots(slots)) == slots


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_keys_come_back(keys: list[bytes]) -> None:
    assert list(unpack_keys(b"".join(keys))) == keys


def test_half_a_slot_or_a_key_is_refused() -> None:
    with pytest.raises(BadRequest, match="4 bytes each: 5"):
        unpack_slots(bytes(5))
    with pytest.raises(BadRequest, match="16 bytes each: 17"):
        unpack_keys(bytes(17))


def test_a_block_has_all_its_tokens() -> None:
    block = StoreBlock(b"k" * 16, None, bytes(8), "lora", "salt")
    assert to_contents([block], 2) == [Content(b"k" * 16, None, bytes(8), "lora", "salt")]
    with pytest.raises(BadRequest, match="tokens of 8 bytes, not 12"):
        to_contents([block], 3)


def test_a_block_names_at_most_an_image_a_token() -> None:
    block = StoreBlock(b"k" * 16, None, bytes(8), extra=b"x" * 72)
    assert to_contents([block], 2)[0].extra == block.extra
    for extra in (b"x" * 108, b"x" * 35):
        with pytest.raises(BadRequest, match=f"names its images with {len(extra)} bytes"):
            to_contents([msgspec.structs.replace(block, extra=extra)], 2)


@pytest.mark.parametrize("field", ["lora", "salt"])
def test_the_names_in_a_block_are_bounded(field: str) -> None:
    block = StoreBlock(b"k" * 16, None, bytes(8))
    longest = msgspec.structs.replace(block, **{field: "x" * LABEL_CHARS})
    assert len(to_contents([longest], 2)) == 1
    with pytest.raises(BadRequest, match=f"over {LABEL_CHARS} characters"):
        to_contents([msgspec.structs.replace(block, **{field: "x" * (LABEL_CHARS + 1)})], 2)
