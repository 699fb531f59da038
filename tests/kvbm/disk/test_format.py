from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvbm.disk.format import (
    IMAGES_VERSION,
    PAGE_BYTES,
    VARIABLE_BYTES,
    VERSION,
    DiskGeometry,
    Header,
    HeaderTooLarge,
    decode_header,
    disk_geometry,
    encode_header,
)
from shared.blocks import Content
from tests.kvbm.disk_rig import LAYOUT, content, small

SHAPE = small()
KEYS = st.binary(min_size=16, max_size=16)
U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    st.builds(
        Content,
        *(KEYS, st.none() | KEYS, st.binary(max_size=2048), st.text(max_size=80), st.text(max_size=80)),
        st.binary(max_size=576),
    ),
    U64,
    U64,
)


def page_of(header: Header, shape: DiskGeometry = SHAPE) -> bytearray:
    page = bytearray(b"\xaa" * PAGE_BYTES)
    encode_header(page, shape, header)
    return page


@given(HEADERS)
def test_a_header_is_read_back_as_it_was_written(header: Header) -> None:
    assert decode_header(page_of(header), SHAPE) == header


@given(HEADERS, st.integers(0, PAGE_BYTES - 1), st.integers(0, 7))
def test_any_bit_that_flips_makes_a_header_torn(header: Header, byte: int, bit: int) -> None:
    page = page_of(header)
    page[byte] ^= 1 << bit
    assert decode_header(page, SHAPE) == "torn"


@given(st.binary(max_size=2 * PAGE_BYTES))
def test_any_bytes_are_no_header_and_raise_nothing(page: bytes) -> None:
    assert decode_header(page, SHAPE) == "torn"


def test_a_page_never_written_is_blank() -> None:
    assert decode_header(bytes(PAGE_BYTES), SHAPE) == "blank"


def test_a_record_of_another_layout_or_size_is_foreign() -> None:
    page = page_of(Header(content(1), 1, 2))
    assert decode_header(page, disk_geometry("ff" * 8, SHAPE.payload_bytes, 1 << 20, 1 << 20)) == "layout"
    assert decode_header(page, disk_geometry(LAYOUT, SHAPE.payload_bytes - 1, 1 << 20, 1 << 20)) == "layout"


def test_a_record_of_another_version_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvbm.disk.format.VERSION", IMAGES_VERSION + 1)
    page = page_of(Header(content(1), 1, 2))
    monkeypatch.undo()
    assert decode_header(page, SHAPE) == "version"


def test_a_record_with_images_has_a_version_of_its_own_which_earlier_releases_refuse() -> None:
    plain, image = (page_of(Header(Content(bytes(16), None, b"abcd", extra=extra), 1, 2)) for extra in (b"", b"x" * 36))
    assert (int.from_bytes(plain[16:20], "little"), int.from_bytes(image[16:20], "little")) == (VERSION, VERSION + 1)


def test_tokens_that_do_not_fit_are_refused_and_leave_the_page_alone() -> None:
    page = page_of(Header(content(1), 1, 2))
    before = bytes(page)
    with pytest.raises(HeaderTooLarge) as raised:
        encode_header(page, SHAPE, Header(Content(bytes(16), None, bytes(VARIABLE_BYTES), "l"), 1, 2))
    assert raised.value.size_bytes == VARIABLE_BYTES + 1
    assert bytes(page) == before
    just = Header(Content(bytes(16), None, bytes(VARIABLE_BYTES)), 1, 2)
    assert decode_header(page_of(just), SHAPE) == just


@given(st.integers(1, 50_000), st.integers(1, 10**6), st.integers(1, 10**6))
def test_records_lie_side_by_side_in_aligned_places_within_the_limit(
    payload_bytes: int, limit_bytes: int, segment_bytes: int
) -> None:
    try:
        shape = disk_geometry(LAYOUT, payload_bytes, limit_bytes, segment_bytes)
    except ValueError:
        assert PAGE_BYTES + payload_bytes > limit_bytes - PAGE_BYTES
        return
    sizes = [shape.records_in(segment) for segment in range(shape.segments)]
    assert sum(sizes) == shape.capacity
    assert min(sizes) >= 1
    assert shape.capacity * shape.record_bytes <= limit_bytes
    places = [shape.position(record) for record in range(shape.capacity)]
    expected = [(segment, i * shape.record_bytes) for segment, size in enumerate(sizes) for i in range(size)]
    assert places == expected
    assert shape.record_bytes % PAGE_BYTES == 0
    assert shape.memory_bytes >= payload_bytes


@pytest.mark.parametrize("layout", ["", "0011", "00112233445566FF", "../../../../etc/", "00112233445566 f"])
def test_a_layout_that_is_no_digest_is_refused(layout: str) -> None:
    with pytest.raises(ValueError, match="digest"):
        disk_geometry(layout, 1, 1 << 20, 1 << 20)


def test_a_limit_below_one_record_is_refused() -> None:
    with pytest.raises(ValueError, match=r"raise disk\.limit_bytes"):
        disk_geometry(LAYOUT, 4096, 8191, 1 << 20)
    with pytest.raises(ValueError, match="blocks of 0 bytes"):
        disk_geometry(LAYOUT, 0, 8191, 1 << 20)
