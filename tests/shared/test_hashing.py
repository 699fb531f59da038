"""The routing hashes, against Dynamo's published values and xxhash itself, and the content keys."""

from __future__ import annotations

import hashlib
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared import hashing

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=100)
NAMES = st.text(min_size=1, max_size=10)


def test_hashes_equal_those_in_dynamos_own_tests() -> None:
    """Tokens 1 … 12 in blocks of 4, seed 1337: the values in Dynamo's tokens.rs."""
    packed = hashing.pack_tokens(range(1, 13))
    blocks = [hashing.block_hash(packed[start : start + 16]) for start in (0, 16, 32)]
    assert blocks == [14643705804678351452, 16777012769546811212, 483935686894639516]
    expected = [14643705804678351452, 4945711292740353085, 12583592247330656132]
    assert hashing.sequence_hashes(packed, 4) == expected


@given(TOKEN_IDS, st.integers(1, 20), st.text(max_size=5), st.text(max_size=5))
def test_a_sequence_hash_is_xxh3_of_parent_and_block(tokens: list[int], block_size: int, lora: str, salt: str) -> None:
    seed = 1337
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), 1)
    seed %= 2**64
    expected: list[int] = []
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        block = xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *tokens[start : start + block_size]), seed)
        above = struct.pack("<QQ", expected[-1], block) if expected else b""
        expected.append(xxhash.xxh3_64_intdigest(above, seed) if expected else block)
    packed = hashing.pack_tokens(tokens)
    assert hashing.sequence_hashes(packed, block_size, hashing.seed_of(lora, salt)) == expected


@given(TOKEN_IDS, TOKEN_IDS, st.integers(1, 20))
def test_a_longer_prompt_begins_with_the_hashes_of_its_prefix(
    tokens: list[int], more: list[int], block_size: int
) -> None:
    short, long = hashing.pack_tokens(tokens), hashing.pack_tokens(tokens + more)
    full = len(tokens) // block_size
    root = hashing.root_key("model")
    assert len(hashing.sequence_hashes(short, block_size)) == full
    assert hashing.sequence_hashes(long, block_size)[:full] == hashing.sequence_hashes(short, block_size)
    assert hashing.content_keys(root, long, block_size)[:full] == hashing.content_keys(root, short, block_size)


def test_a_partial_block_is_left_out() -> None:
    assert hashing.sequence_hashes(hashing.pack_tokens(range(15)), 16) == []
    assert len(hashing.sequence_hashes(hashing.pack_tokens(range(33)), 16)) == 2
    assert len(hashing.content_keys(hashing.root_key("model"), hashing.pack_tokens(range(33)), 16)) == 2


@given(NAMES, NAMES)
def test_seeds_differ_by_lora_and_by_salt(name: str, other: str) -> None:
    seeds = [hashing.seed_of(), hashing.seed_of(lora=name), hashing.seed_of(salt=name), hashing.seed_of(name, name)]
    assert len(set(seeds)) == len(seeds)
    assert (hashing.seed_of(lora=name) == hashing.seed_of(lora=other)) is (name == other)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_content_key_is_half_a_sha256() -> None:
    root = hashing.root_key("model")
    packed = hashing.pack_tokens(range(8))
    first = hashlib.sha256(root + packed[:16]).digest()[:16]
    second = hashlib.sha256(first + packed[16:]).digest()[:16]
    assert hashing.content_keys(root, packed, 4) == [first, second]
    assert hashing.event_hash(second) == int.from_bytes(second[8:], "big")
    assert hashing.event_hashes([first, second]) == [hashing.event_hash(first), hashing.event_hash(second)]
    assert hashing.event_hashes([]) == []


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)), min_size=2, unique=True))
def test_roots_differ_wherever_model_lora_and_salt_do(names: list[tuple[str, str, str]]) -> None:
    """Also for ("ab", "c") and ("a", "bc")."""
    assert len({hashing.root_key(*each) for each in names}) == len(names)


@given(TOKEN_IDS)
def test_packed_tokens_are_little_endian_and_come_back(tokens: list[int]) -> None:
    assert hashing.pack_tokens(tokens) == struct.pack(f"<{len(tokens)}I", *tokens)
    assert hashing.unpack_tokens(hashing.pack_tokens(tokens)) == tokens


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_hashes_are_little_endian_and_come_back(hashes: list[int]) -> None:
    assert hashing.pack_hashes(hashes) == struct.pack(f"<{len(hashes)}Q", *hashes)
    assert hashing.unpack_hashes(hashing.pack_hashes(hashes)) == hashes


def test_torn_packs_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of 4"):
        hashing.unpack_tokens(bytes(7))
    with pytest.raises(ValueError, match="not a multiple of 8"):
        hashing.unpack_hashes(bytes(12))


KEYS = st.binary(min_size=32, max_size=32)


@given(st.integers(1, 8), KEYS, KEYS, st.integers(0, 20), st.integers(1, 20))
def test_an_image_stands_in_the_hashes_of_its_first_block_and_of_all_after_it(
    block_size: int, key: bytes, other: bytes, start: int, tokens: int
) -> None:
    packed, root = hashing.pack_tokens([7] * 64), hashing.root_key("model")
    plain = hashing.content_keys(root, packed, block_size)

    def keys(image: bytes, start: int) -> list[bytes]:
        extras = hashing.image_extras([(image, start, tokens)], block_size)
        assert len(hashing.sequence_hashes(packed, block_size, extras=extras)) == len(plain)
        return hashing.content_keys(root, packed, block_size, extras)

    first = start // block_size
    for changed, since in (
        (keys(key, start), first),
        (keys(key, start + 1), (start + 1) // block_size),
    ):
        assert changed[:since] == plain[:since]
        assert not set(changed[since:]) & set(plain)
    assert (keys(key, start) == keys(other, start)) is (key == other)
    assert keys(key, start) != keys(key, start + 1), "where it begins counts within a block too"


def test_two_images_of_a_block_are_both_in_its_hash_in_their_order() -> None:
    a, b = b"a" * 32, b"b" * 32
    assert hashing.image_extras([(a, 1, 2), (b, 3, 3)], 4) == {
        0: a + b"\x01\0\0\0" + b + b"\x03\0\0\0",
        1: b + b"\xff\xff\xff\xff",
    }


def test_the_self_test_tells_block_sizes_apart() -> None:
    assert hashing.self_test(16) == "a4dda066f3c1e1a042139d767f1181b7"
    assert hashing.self_test(32) != hashing.self_test(16)
