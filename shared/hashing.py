"""Hashes of token ids: 64-bit hashes for routing, 128-bit content keys for sharing bytes. Pure.

    tokens   | t0 … t15 | t16 … t31 | t32 …           only full blocks are hashed
    block      b0         b1                          XXH3-64 of the tokens as little-endian u32
    sequence   s0 = b0    s1 = XXH3-64(s0 ‖ b1)       names the whole prefix, this block included
    content    k0 = H(root ‖ t0…t15)   k1 = H(k0 ‖ t16…t31)      H = first 16 bytes of SHA-256

A block in which an image has tokens is hashed with its tokens ‖ the image's key ‖ where it starts, by image.

The two XXH3 hashes are those of NVIDIA Dynamo, bit for bit: the seed is 1337; a LoRA adds XXH3-64(name, seed 0) and a
tenant salt adds XXH3-64(salt, seed 1) to the seed, modulo 2^64. XXH3 is not collision resistant: a second block with
the same hash can be forged in minutes. So these hashes only choose a worker; cached bytes are shared by content key.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from types import MappingProxyType

from xxhash import xxh3_64_intdigest

SEED = 1337
_MASK = (1 << 64) - 1
_PAIR = Struct("<QQ").pack
_IMAGE = Struct("<32si")
EXTRA_BYTES = _IMAGE.size
"""The bytes that each image of a block has in what `image_extras` returns."""
_LAST_8_OF_16 = Struct(">8xQ").unpack
KEY_BYTES = 16
NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})

ContentKey = bytes
"""The content key of a block: 16 bytes. Equal keys mean equal bytes of KV cache."""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Pack token ids as little-endian u32, the form in every message. The fastest input is an array from
    `token_array`."""
    if sys.byteorder == "little" and type(tokens) is array and tokens.typecode == "I":
        return tokens.tobytes()
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def token_array(packed: bytes) -> array[int]:
    """Unpack token ids into an array, without an object for each id. Raise ValueError if the length is not a multiple
    of 4."""
    if len(packed) % 4:
        raise ValueError(f"packed token ids of {len(packed)} bytes: not a multiple of 4")
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def unpack_tokens(packed: bytes) -> list[int]:
    """Unpack token ids. Raise ValueError if the length is not a multiple of 4."""
    return token_array(packed).tolist()


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Pack 64-bit hashes as little-endian u64."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> list[int]:
    """Unpack 64-bit hashes. Raise ValueError if the length is not a multiple of 8."""
    if len(packed) % 8:
        raise ValueError(f"packed hashes of {len(packed)} bytes: not a multiple of 8")
    hashes = array("Q")
    hashes.frombytes(packed)
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes.tolist()


def seed_of(lora: str = "", salt: str = "") -> int:
    """Return the seed of the routing hashes for a LoRA and a tenant salt (empty: none)."""
    seed = SEED
    if lora:
        seed += xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxh3_64_intdigest(salt.encode(), 1)
    return seed & _MASK


def block_hash(packed_block: bytes, seed: int = SEED) -> int:
    """Return the hash of one full block's packed token ids."""
    return xxh3_64_intdigest(packed_block, seed)


def next_sequence_hash(parent: int | None, block: int, seed: int = SEED) -> int:
    """Return the sequence hash of a block with hash `block` that follows `parent` (None: it is the first block)."""
    if parent is None:
        return block
    return xxh3_64_intdigest(_PAIR(parent, block), seed)


def image_extras(images: Iterable[tuple[bytes, int, int]], block_size: int) -> dict[int, bytes]:
    """Return what the hashes of blocks cover next to their tokens, by the block's number: for each image that has
    tokens in it, in order, the image's key and the index of its first token within the block (i32, below 0 if it began
    earlier).

    An image is (key, index of its first token, number of its tokens), with at least one token."""
    extras: dict[int, bytes] = {}
    for key, start, tokens in images:
        for number in range(start // block_size, (start + tokens - 1) // block_size + 1):
            extras[number] = extras.get(number, b"") + _IMAGE.pack(key, start - number * block_size)
    return extras


def split_extra(extra: bytes) -> list[tuple[bytes, int]]:
    """Return the images of one block, as `image_extras` has joined them: of each its key, and the index of its first
    token within the block. Raise ValueError."""
    if len(extra) % _IMAGE.size:
        raise ValueError(f"{len(extra)} bytes are not images of {_IMAGE.size} bytes each")
    return [(key, start) for key, start in _IMAGE.iter_unpack(extra)]


def join_extra(images: Iterable[tuple[bytes, int]]) -> bytes:
    """Return what `split_extra` splits."""
    return b"".join(_IMAGE.pack(key, start) for key, start in images)


def salted_image_key(key: bytes, salt: str) -> bytes:
    """Return the key of an image's embeddings for a tenant salt, which may be empty: how fast an answer comes must not
    say which images other tenants have sent."""
    return hashlib.sha256(salt.encode() + key).digest() if salt else key


def sequence_hashes(
    packed: bytes,
    block_size: int,
    seed: int = SEED,
    parent: int | None = None,
    extras: Mapping[int, bytes] = NO_EXTRAS,
) -> list[int]:
    """Return the sequence hash of each full block of `packed` token ids.

    The blocks follow the one with the sequence hash `parent` (None: they begin the sequence). A partial last block is
    left out. `extras` is that of `image_extras`; the first block of `packed` has number 0."""
    stride = 4 * block_size
    hashes: list[int] = []
    for start in range(0, len(packed) - stride + 1, stride):
        contents = packed[start : start + stride]
        if extras:
            contents += extras.get(start // stride, b"")
        block = xxh3_64_intdigest(contents, seed)
        parent = block if parent is None else xxh3_64_intdigest(_PAIR(parent, block), seed)
        hashes.append(parent)
    return hashes


def root_key(model: str, lora: str = "", salt: str = "") -> ContentKey:
    """Return the content key from which every chain of (model, LoRA, tenant salt) starts."""
    fields = [part.encode() for part in (model, lora, salt)]
    framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hashlib.sha256(b"headrace root" + framed).digest()[:KEY_BYTES]


def content_key(parent: ContentKey, packed_block: bytes) -> ContentKey:
    """Return the content key of a full block of packed token ids that follows `parent` (a block's key, or the root)."""
    return hashlib.sha256(parent + packed_block).digest()[:KEY_BYTES]


def content_keys(
    root: ContentKey, packed: bytes, block_size: int, extras: Mapping[int, bytes] = NO_EXTRAS
) -> list[ContentKey]:
    """Return the content key of each full block of `packed` token ids; `extras` is that of `image_extras`."""
    stride = 4 * block_size
    keys: list[ContentKey] = []
    parent = root
    for start in range(0, len(packed) - stride + 1, stride):
        parent = content_key(parent, packed[start : start + stride] + extras.get(start // stride, b""))
        keys.append(parent)
    return keys


def event_hash(key: ContentKey) -> int:
    """Return the 64-bit hash that names a block in our workers' KV events: the low 64 bits of its content key."""
    return int(_LAST_8_OF_16(key)[0])


def event_hashes(keys: Iterable[ContentKey]) -> list[int]:
    """Return the `event_hash` of each key: of 512 keys in a fifth of the time."""
    halves = array("Q", b"".join(keys))
    if sys.byteorder == "little":
        halves.byteswap()
    return halves[1::2].tolist()


def self_test(block_size: int) -> str:
    """Return a short hex text, equal in two programs only if their routing hashes agree for this block size."""
    tokens: Sequence[int] = range(block_size * 3)
    plain = sequence_hashes(pack_tokens(tokens), block_size)
    seeded = sequence_hashes(pack_tokens(tokens), block_size, seed_of("lora", "salt"))
    return f"{plain[-1]:016x}{seeded[-1]:016x}"
