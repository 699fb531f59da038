"""Where everything lies in a kvbm's pool file. All of it follows from the file's size. Pure.

    0          4096                  slots_at, a multiple of 64 KiB                                           file_bytes
    | header   | generations         | arena 0                              | arena 1                         | rest |
    | 4096     | u64 a page of slots | slot 0 | slot 1 | …                  | slot 0 | …                       |

An arena holds the slots of one layout: the file is cut into arenas of one size, and each of them into slots as large as
the layout's blocks, rounded up to 4096 bytes, so that a slot can be read from and written to disk with O_DIRECT.

Slots of any size are whole pages, so the table has one number for each page of slots: those of an arena that begins at
page p are the numbers from p on, and no two arenas share one. A slot's generation grows each time the slot is granted
for writing. Whoever has copied from a slot looks again: another number, and the copy is worth nothing. Numbers are in
the machine's own byte order, which is little-endian on all that we run on.

The file is opened by several processes and could be anything: what is read from it is taken only where it is exactly
what it must be.
"""

from __future__ import annotations

from struct import Struct as Fields

from msgspec import Struct

from shared.errors import HeadraceError

MAGIC = b"HRKVPOOL"
VERSION = 1
PAGE_BYTES = 4096
ALIGN_BYTES = 1 << 16
"""Of arenas: the largest page of the CPUs we run on, so that each can be mapped by itself."""
MOST_BYTES = 1 << 46
LEAST_BYTES = 2 * ALIGN_BYTES
_FIELDS = Fields("<8sIIQQQQ")
HEADER_BYTES = _FIELDS.size


class PoolUnfit(HeadraceError):
    """A pool file, or a place in one, that is not what was agreed; the message says in what."""


class Arena(Struct, frozen=True):
    """The slots of one layout: slot i at `offset` + i · `slot_bytes`, its generation at `generations` + 8 · i."""

    offset: int
    slot_bytes: int
    """Between the starts of two slots."""
    slots: int
    generations: int

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * self.slots


class Geometry(Struct, frozen=True):
    """The layout of one pool file; made by `of`."""

    file_bytes: int
    slots_at: int
    pages: int
    """Of slots, and as many generations."""

    @staticmethod
    def of(file_bytes: int) -> Geometry:
        """Raises PoolUnfit where no pool has this size."""
        if not LEAST_BYTES <= file_bytes <= MOST_BYTES or file_bytes % ALIGN_BYTES:
            raise PoolUnfit(
                f"{file_bytes} bytes: a pool has from {LEAST_BYTES} to {MOST_BYTES}, and a multiple of {ALIGN_BYTES}"
            )
        slots_at = _up(PAGE_BYTES + 8 * (file_bytes // PAGE_BYTES), ALIGN_BYTES)
        return Geometry(file_bytes, slots_at, (file_bytes - slots_at) // PAGE_BYTES)

    @property
    def generations_at(self) -> int:
        return PAGE_BYTES

    def header(self) -> bytes:
        """The file's first bytes."""
        return _FIELDS.pack(MAGIC, VERSION, PAGE_BYTES, self.file_bytes, self.generations_at, self.slots_at, self.pages)

    def arena(self, index: int, count: int, block_bytes: int) -> Arena:
        """The slots for blocks of `block_bytes` in the arena `index` of `count`. Raises PoolUnfit where not one of
        them has room."""
        assert 0 <= index < count
        assert block_bytes > 0
        arena_bytes = (self.file_bytes - self.slots_at) // count // ALIGN_BYTES * ALIGN_BYTES
        slot_bytes = _up(block_bytes, PAGE_BYTES)
        if slot_bytes > arena_bytes:
            raise PoolUnfit(f"a block of {block_bytes} bytes is larger than an arena of {arena_bytes}")
        start = index * arena_bytes
        return Arena(
            offset=self.slots_at + start,
            slot_bytes=slot_bytes,
            slots=arena_bytes // slot_bytes,
            generations=self.generations_at + 8 * (start // PAGE_BYTES),
        )

    def check(self, arena: Arena) -> None:
        """Raises PoolUnfit where an arena that another process named is none of this file's."""
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


def parse(header: bytes, file_bytes: int) -> Geometry:
    """The geometry of a file that begins with `header` and is `file_bytes` long. Raises PoolUnfit."""
    if len(header) < HEADER_BYTES:
        raise PoolUnfit(f"{len(header)} bytes are no header")
    magic, version, page_bytes, stated_bytes, _, _, _ = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise PoolUnfit("no pool: its first bytes are others")
    if version != VERSION:
        raise PoolUnfit(f"a pool of version {version}; this is version {VERSION}")
    if page_bytes != PAGE_BYTES:
        raise PoolUnfit(f"a pool with pages of {page_bytes} bytes; ours have {PAGE_BYTES}")
    if stated_bytes != file_bytes:
        raise PoolUnfit(f"a pool of {stated_bytes} bytes in a file of {file_bytes}")
    geometry = Geometry.of(file_bytes)
    if header[:HEADER_BYTES] != geometry.header():
        raise PoolUnfit("a header whose offsets do not follow from its size")
    return geometry


def usable(size_bytes: int) -> int:
    """The largest size of a pool within `size_bytes`. Raises PoolUnfit where there is none."""
    return Geometry.of(size_bytes // ALIGN_BYTES * ALIGN_BYTES).file_bytes


def _up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple
