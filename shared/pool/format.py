"""The layout of a kvbm's pool file, which follows from the size of the file. Pure.

    0          4096                  slots_at, a multiple of 64 KiB                                           file_bytes
    | header   | generations         | arena 0                              | arena 1                         | rest |
    | 4096     | u64 a page of slots | slot 0 | slot 1 | …                  | slot 0 | …                       |

The file is divided into arenas of one size. An arena holds the slots of one layout. A slot is as large as the layout's
blocks, rounded up to 4096 bytes, so that it can be read from disk and written to disk with O_DIRECT.

Slots of any size are whole pages, so the table has one number for each page of slots. The numbers of an arena that
begins at page p are those from p on, and no two arenas share one. A slot's generation grows each time the slot is
granted for writing. A process that has copied a slot reads the generation again: if it has changed, the copy is
worthless. Numbers are in the machine's byte order, which is little-endian on all supported machines.

The file is opened by several processes and could contain anything. A header is accepted only if every byte is exactly
as it must be.
"""

from __future__ import annotations

from struct import Struct as Fields

from msgspec import Struct

from shared.errors import HeadraceError

MAGIC = b"HRKVPOOL"
VERSION = 1
PAGE_BYTES = 4096
ALIGN_BYTES = 1 << 16
"""The alignment of arenas: the largest page size of the supported CPUs, so that each arena can be mapped by itself."""
MOST_BYTES = 1 << 46
LEAST_BYTES = 2 * ALIGN_BYTES
_FIELDS = Fields("<8sIIQQQQ")
HEADER_BYTES = _FIELDS.size


class PoolUnfit(HeadraceError):
    """A pool file, or an arena in one, is not valid. The message says why."""


class Arena(Struct, frozen=True):
    """The slots of one layout: slot i at `offset` + i · `slot_bytes`, its generation at `generations` + 8 · i."""

    offset: int
    slot_bytes: int
    """The distance between the starts of two slots."""
    slots: int
    generations: int

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * self.slots

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins in the file."""
        return self.offset + slot * self.slot_bytes


class PoolGeometry(Struct, frozen=True):
    """The layout of one pool file; made by `of`."""

    file_bytes: int
    slots_at: int
    pages: int
    """The number of pages of slots, which is also the number of generations."""

    @staticmethod
    def of(file_bytes: int) -> PoolGeometry:
        """Return the layout of a file of this size. Raise PoolUnfit if no pool has this size."""
        if not LEAST_BYTES <= file_bytes <= MOST_BYTES or file_bytes % ALIGN_BYTES:
            raise PoolUnfit(
                f"{file_bytes} bytes: a pool has from {LEAST_BYTES} to {MOST_BYTES}, and a multiple of {ALIGN_BYTES}"
            )
        slots_at = _up(PAGE_BYTES + 8 * (file_bytes // PAGE_BYTES), ALIGN_BYTES)
        return PoolGeometry(file_bytes, slots_at, (file_bytes - slots_at) // PAGE_BYTES)

    @property
    def generations_at(self) -> int:
        return PAGE_BYTES

    def header(self) -> bytes:
        """Return the first bytes of the file."""
        return _FIELDS.pack(MAGIC, VERSION, PAGE_BYTES, self.file_bytes, self.generations_at, self.slots_at, self.pages)

    def arena(self, index: int, count: int, block_bytes: int) -> Arena:
        """Return the slots for blocks of `block_bytes` in the arena `index` of `count`.

        Raise PoolUnfit if an arena has no room for a block.
        """
        assert 0 <= index < count
        assert block_bytes > 0
        arena_bytes = (self.file_bytes - self.slots_at) // count // ALIGN_BYTES * ALIGN_BYTES
        slot_bytes = _up(block_bytes, PAGE_BYTES)
        if slot_bytes > arena_bytes:
            raise PoolUnfit(
                f"a block of {block_bytes} bytes is larger than an arena of {arena_bytes}: give kvbm a larger"
                " pool.size_bytes, or fewer pool.arenas"
            )
        start = index * arena_bytes
        return Arena(
            offset=self.slots_at + start,
            slot_bytes=slot_bytes,
            slots=arena_bytes // slot_bytes,
            generations=self.generations_at + 8 * (start // PAGE_BYTES),
        )

    def check(self, arena: Arena) -> None:
        """Raise PoolUnfit if an arena that another process named is not one of this file."""
        first_page, odd = divmod(arena.generations - self.generations_at, 8)
        fits = (
            arena.slots > 0
            and arena.slot_bytes > 0
            and arena.slot_bytes % PAGE_BYTES == 0
            and arena.offset % ALIGN_BYTES == 0
            and arena.offset >= self.slots_at
            and arena.offset + arena.size_bytes <= self.file_bytes
            and odd == 0
            and first_page == (arena.offset - self.slots_at) // PAGE_BYTES
        )
        if not fits:
            raise PoolUnfit(f"{arena} does not lie in a pool of {self.file_bytes} bytes")


def parse(header: bytes, file_bytes: int) -> PoolGeometry:
    """Return the layout of a file that begins with `header` and is `file_bytes` long. Raise PoolUnfit."""
    if len(header) < HEADER_BYTES:
        raise PoolUnfit(f"the header has only {len(header)} bytes")
    magic, version, page_bytes, stated_bytes, _, _, _ = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise PoolUnfit("not a pool: the file begins with other bytes")
    if version != VERSION:
        raise PoolUnfit(f"a pool of version {version}; this program has version {VERSION}")
    if page_bytes != PAGE_BYTES:
        raise PoolUnfit(f"a pool with pages of {page_bytes} bytes; ours have {PAGE_BYTES}")
    if stated_bytes != file_bytes:
        raise PoolUnfit(f"a pool of {stated_bytes} bytes in a file of {file_bytes}")
    geometry = PoolGeometry.of(file_bytes)
    if header[:HEADER_BYTES] != geometry.header():
        raise PoolUnfit("the offsets in the header do not follow from the size")
    return geometry


def usable(size_bytes: int) -> int:
    """Return the largest size of a pool within `size_bytes`. Raise PoolUnfit if there is none."""
    return PoolGeometry.of(size_bytes // ALIGN_BYTES * ALIGN_BYTES).file_bytes


def _up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple
