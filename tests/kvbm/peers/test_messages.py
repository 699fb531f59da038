"""What is believed of another kvbm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.kvbm.peers.messages import (
    FRAME_BYTES_MOST,
    LAYOUTS_MOST,
    PEER_PROTOCOL,
    BlockHeader,
    Counted,
    Lent,
    Located,
    PeerFault,
    PeerHello,
    PeerLayout,
    PeerRefused,
    check_counted,
    check_header,
    check_hello,
    check_layout,
    check_lent,
    check_located,
    decode_answer,
    frame_length,
    pack_frame,
    pack_header,
    plan_takes,
)
from shared.messages.kvbm import StoreBlock, StoreLayout
from tests.kvbm.chains import chain
from tests.kvbm.store_rig import LAYOUT

HELLO = PeerHello(PEER_PROTOCOL, "i", 7, [PeerLayout(LAYOUT.digest, LAYOUT, LAYOUT.kv.block_bytes)])
CONTENTS = chain(1, 2, 3)
KEYS = [each.key for each in CONTENTS]
LENT = Lent(5, 1, 30.0, [StoreBlock(each.key, each.parent, each.tokens) for each in CONTENTS])


def code(check: Callable[[], object]) -> str:
    with pytest.raises(PeerFault) as fault:
        check()
    return fault.value.code


def test_a_hello_of_the_right_kvbm_is_believed() -> None:
    assert check_hello(HELLO, "i", None) == check_hello(HELLO, "i", 7) == HELLO
    check_layout(HELLO, LAYOUT)


def test_another_instance_epoch_or_protocol_is_not_believed() -> None:
    assert code(lambda: check_hello(HELLO, "j", None)) == "elsewhere"
    assert code(lambda: check_hello(HELLO, "i", 8)) == "epoch"
    assert code(lambda: check_hello(replace(HELLO, protocol=2), "i", 7)) == "protocol"
    assert code(lambda: check_hello(Counted(1, 1), "i", 7)) == "garbage"
    many = replace(HELLO, layouts=HELLO.layouts * (LAYOUTS_MOST + 1))
    assert code(lambda: check_hello(many, "i", 7)) == "garbage"


@pytest.mark.parametrize(
    "theirs",
    [
        replace(LAYOUT, rank=1),
        replace(LAYOUT, model="other"),
        replace(LAYOUT, weights="other"),
        replace(LAYOUT, kv=replace(LAYOUT.kv, dtype="float16")),
        replace(LAYOUT, kv=replace(LAYOUT.kv, block_size=2)),
    ],
)
def test_another_layout_is_not_believed_even_under_the_same_digest(theirs: StoreLayout) -> None:
    honest = replace(HELLO, layouts=[PeerLayout(theirs.digest, theirs, theirs.kv.block_bytes)])
    assert code(lambda: check_layout(honest, LAYOUT)) == "layout"
    lying = replace(HELLO, layouts=[PeerLayout(LAYOUT.digest, theirs, LAYOUT.kv.block_bytes)])
    assert code(lambda: check_layout(lying, LAYOUT)) == "layout"


def test_a_fault_says_which_field_differs() -> None:
    theirs = replace(LAYOUT, kv=replace(LAYOUT.kv, dtype="float16"))
    hello = replace(HELLO, layouts=[PeerLayout(LAYOUT.digest, theirs, 1)])
    with pytest.raises(PeerFault, match="dtype 'float32' here, 'float16' there"):
        check_layout(hello, LAYOUT)


def test_blocks_of_another_size_are_not_believed() -> None:
    hello = replace(HELLO, layouts=[PeerLayout(LAYOUT.digest, LAYOUT, 4096)])
    assert code(lambda: check_layout(hello, LAYOUT)) == "size"


def test_a_loan_is_a_prefix_of_what_was_asked() -> None:
    assert check_lent(LENT, 5, KEYS) == LENT
    assert check_lent(replace(LENT, blocks=LENT.blocks[:1]), 5, KEYS).blocks == LENT.blocks[:1]
    assert code(lambda: check_lent(LENT, 5, KEYS[:2])) == "garbage"
    assert code(lambda: check_lent(replace(LENT, blocks=LENT.blocks[1:]), 5, KEYS)) == "garbage"
    assert code(lambda: check_lent(LENT, 6, KEYS)) == "garbage"
    assert code(lambda: check_lent(replace(LENT, time_left_s=float("nan")), 5, KEYS)) == "garbage"
    broken = [LENT.blocks[0], StoreBlock(KEYS[1], KEYS[2], b""), LENT.blocks[2]]
    assert code(lambda: check_lent(replace(LENT, blocks=broken), 5, KEYS)) == "garbage"
    assert code(lambda: check_lent(PeerRefused(5, "epoch", "x"), 5, KEYS)) == "epoch"
    assert code(lambda: check_lent(PeerRefused(5, "full", "x"), 5, KEYS)) == "refused"
    assert code(lambda: check_lent(PeerRefused(4, "full", "x"), 5, KEYS)) == "garbage"


def test_a_count_lies_within_what_was_asked() -> None:
    assert check_counted(Counted(5, 3), 5, 3) == 3
    assert code(lambda: check_counted(Counted(5, 4), 5, 3)) == "garbage"
    assert code(lambda: check_counted(Counted(5, -1), 5, 3)) == "garbage"
    assert code(lambda: check_counted(PeerRefused(5, "full", "x"), 5, 3)) == "refused"


def test_places_are_as_many_as_were_asked_for() -> None:
    located = Located(5, b"agent", [100, 200], [1, 2])
    assert check_located(located, 5, 2) == located
    assert code(lambda: check_located(located, 6, 2)) == "garbage"
    assert code(lambda: check_located(located, 5, 3)) == "garbage"
    assert code(lambda: check_located(replace(located, addresses=[100]), 5, 2)) == "garbage"
    assert code(lambda: check_located(replace(located, checksums=[1, 2, 3]), 5, 2)) == "garbage"
    assert code(lambda: check_located(Counted(5, 2), 5, 2)) == "garbage"
    assert code(lambda: check_located(PeerRefused(5, "no_agent", "x"), 5, 2)) == "refused"
    assert code(lambda: check_located(PeerRefused(4, "no_agent", "x"), 5, 2)) == "garbage"


def test_a_header_is_that_of_the_block_that_must_come() -> None:
    header = BlockHeader(9, 2, 8000, 1 << 63)
    assert check_header(pack_header(header), 9, 2, 8000) == header
    assert code(lambda: check_header(pack_header(header), 9, 3, 8000)) == "garbage"
    assert code(lambda: check_header(pack_header(header), 8, 2, 8000)) == "garbage"
    assert code(lambda: check_header(pack_header(header), 9, 2, 4000)) == "size"
    assert check_header(pack_header(BlockHeader(9, 0, 0, 0)), 9, 2, 8000).size_bytes == 0


def test_a_frame_has_a_length_within_bounds() -> None:
    assert frame_length(pack_frame(b"abc")[:4]) == 3
    for length in (0, FRAME_BYTES_MOST + 1, 0xFFFFFFFF):
        assert code(lambda length=length: frame_length(length.to_bytes(4, "little"))) == "garbage"  # type: ignore[misc]


@given(st.binary(max_size=64))
def test_any_bytes_are_an_answer_or_a_fault(body: bytes) -> None:
    with suppress(PeerFault):
        decode_answer(body)


@given(st.integers(0, 300), st.integers(1, 1 << 22), st.integers(1, 16), st.integers(1, 1 << 24))
def test_takes_divide_all_blocks_in_order(count: int, block_bytes: int, streams: int, take_bytes: int) -> None:
    takes = plan_takes(list(range(count)), block_bytes, streams, take_bytes)
    assert [index for take in takes for index in take] == list(range(count))
    assert all(take for take in takes)
    assert all(len(take) * block_bytes <= max(take_bytes, block_bytes) for take in takes)
    assert all(len(take) <= -(-count // streams) for take in takes), "no stream has more than its part at once"
