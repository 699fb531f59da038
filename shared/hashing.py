"""Token ids to hashes: the 64-bit hashes that route and the 128-bit content keys that guard bytes. Pure.

    tokens   | t0 … t15 | t16 … t31 | t32 …           only full blocks are hashed
    block      b0         b1                          XXH3-64 of the tokens as little-endian u32
    sequence   s0 = b0    s1 = XXH3-64(s0 ‖ b1)       names the whole prefix up to and with the block
    content    k0 = H(root ‖ t0…t15)   k1 = H(k0 ‖ t16…t31)      H = first 16 bytes of SHA-256

The XXH3 pair agrees bit for bit with the hashes of NVIDIA Dynamo (seed 1337; a LoRA adds XXH3-64(name, seed 0) and
a tenant salt adds XXH3-64(salt, seed 1) to the seed, modulo 2^64). XXH3 is not collision resistant: a second block
with the same hash can be forged in minutes, so these hashes only choose a worker. Cached bytes are shared by content
key alone.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

SEED = 1337
_MASK = (1 << 64) - 1
_PAIR = Struct("<QQ").pack
_LAST_8_OF_16 = Struct(">8xQ").unpack
KEY_BYTES = 16

ContentKey = bytes
"""16 bytes; equal keys mean equal bytes of KV cache."""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as packed little-endian u32, the form in which they cross every wire; `token_array`'s fastest."""
    if sys.byteorder == "little" and type(tokens) is array and tokens.typecode == "I":
        return tokens.tobytes()
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def token_array(packed: bytes) -> array[int]:
    """The reverse of `pack_tokens`, without an object for each id. Raises ValueError where the length is no multiple
    of 4."""
    if len(packed) % 4:
        raise ValueError(f"packed token ids of {len(packed)} bytes: not a multiple of 4")
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def unpack_tokens(packed: bytes) -> list[int]:
    """The reverse of `pack_tokens`. Raises ValueError where the length is no multiple of 4."""
    return token_array(packed).tolist()


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """64-bit hashes as packed little-endian u64."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> list[int]:
    """The reverse of `pack_hashes`. Raises ValueError where the length is no multiple of 8."""
    if len(packed) % 8:
        raise ValueError(f"packed hashes of {len(packed)} bytes: not a multiple of 8")
    hashes = array("Q")
    hashes.frombytes(packed)
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes.tolist()


def seed_of(lora: str = "", salt: str = "") -> int:
    """The seed of the routing hashes for a LoRA and a tenant salt (empty: none)."""
    seed = SEED
    if lora:
        seed += xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxh3_64_intdigest(salt.encode(), 1)
    return seed & _MASK


def block_hash(packed_block: bytes, seed: int = SEED) -> int:
    """The hash of one full block's packed token ids."""
    return xxh3_64_intdigest(packed_block, seed)


def next_sequence_hash(parent: int | None, block: int, seed: int = SEED) -> int:
    """The sequence hash of a block with hash `block` behind `parent` (None: the first block)."""
    if parent is None:
        return block
    return xxh3_64_intdigest(_PAIR(parent, block), seed)


def sequence_hashes(packed: bytes, block_size: int, seed: int = SEED, parent: int | None = None) -> list[int]:
    """The sequence hash of each full block of `packed` token ids behind the block with the sequence hash `parent`
    (None: from the first block on); a partial last block is left out."""
    stride = 4 * block_size
    hashes: list[int] = []
    for start in range(0, len(packed) - stride + 1, stride):
        block = xxh3_64_intdigest(packed[start : start + stride], seed)
        parent = block if parent is None else xxh3_64_intdigest(_PAIR(parent, block), seed)
        hashes.append(parent)
    return hashes


def root_key(model: str, lora: str = "", salt: str = "") -> ContentKey:
    """The content key that every chain of (model, LoRA, tenant salt) starts from."""
    fields = [part.encode() for part in (model, lora, salt)]
    framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hashlib.sha256(b"headrace root" + framed).digest()[:KEY_BYTES]


def content_key(parent: ContentKey, packed_block: bytes) -> ContentKey:
    """The content key of a full block of packed token ids behind `parent` (a block's key, or the root)."""
    return hashlib.sha256(parent + packed_block).digest()[:KEY_BYTES]


def content_keys(root: ContentKey, packed: bytes, block_size: int) -> list[ContentKey]:
    """The content key of each full block of `packed` token ids."""
    stride = 4 * block_size
    keys: list[ContentKey] = []
    parent = root
    for start in range(0, len(packed) - stride + 1, stride):
        parent = content_key(parent, packed[start : start + stride])
        keys.append(parent)
    return keys


def event_hash(key: ContentKey) -> int:
    """The 64-bit hash by which our workers' KV events name a block: the low 64 bits of its content key."""
    return int(_LAST_8_OF_16(key)[0])


def self_test(block_size: int) -> str:
    """A short hex text that two programs share only if their routing hashes agree for this block size."""
    tokens: Sequence[int] = range(block_size * 3)
    plain = sequence_hashes(pack_tokens(tokens), block_size)
    seeded = sequence_hashes(pack_tokens(tokens), block_size, seed_of("lora", "salt"))
    return f"{plain[-1]:016x}{seeded[-1]:016x}"
