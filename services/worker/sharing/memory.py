"""What the exchange needs from memory: CUDA's (`device_pages`), or its twin in host memory (`host_pages`). Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from services.worker.sharing.messages import MemoryKind, SlotShape
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import Copier
from services.worker.transfer.errors import DeviceFailed
from shared.errors import HeadraceError

Pages = TypeVar("Pages")

_log = logging.getLogger(__name__)


class MapFailed(HeadraceError):
    """Another process's memory cannot be mapped here. The message says why."""


class ExportedPages(Protocol):
    """Memory of this process that others can map. It lives until `close` here and wherever it is mapped."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def device(self) -> str:
        """The UUID of its GPU, in hex; empty for host memory."""
        ...

    def descriptors(self) -> Sequence[int]:
        """Return open descriptors that stand for the memory. They belong to it."""
        ...

    def close(self) -> None: ...


class MappedPages(Protocol):
    """Memory of another process, mapped here for reading. It stays what it was when that process dies."""

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """Unmap it. Nothing may be reading."""
        ...


class PageMapper(Protocol):
    """Maps the memory of other processes."""

    def map(self, descriptors: Sequence[int], size_bytes: int, device: str) -> MappedPages:
        """Map it for reading. The descriptors stay the caller's. Raise MapFailed."""
        ...


class SharableMemory(Struct, frozen=True):
    """What an engine's memory is to other engines, and theirs to it."""

    kind: MemoryKind
    shape: BlockShape
    """Where the engine's own blocks lie."""
    pages: ExportedPages | None
    """The memory that they lie in, if others can map it."""
    mapper: PageMapper
    copier: Callable[[BlockShape], Copier]
    """Makes a copier from blocks of that shape, which are mapped here, to the engine's own."""


@runtime_checkable
class HasSharableMemory(Protocol):
    """A runner whose KV memory can be exchanged with that of other engines on the machine."""

    def sharable_memory(self) -> SharableMemory:
        """Return the present KV memory; it ends with the next sleep."""
        ...


def placed(shape: SlotShape, address: int) -> BlockShape:
    """Return where blocks lie that are mapped at `address`. The shape was checked."""
    return BlockShape(
        tuple(address + offset for offset in shape.regions), shape.fragment_bytes, shape.stride_bytes, shape.slots
    )


def offsets(shape: BlockShape, address: int) -> SlotShape:
    """Return the shape to offer for blocks in memory that begins at `address`."""
    regions = tuple(region - address for region in shape.regions)
    return SlotShape(regions, shape.fragment_bytes, shape.stride_bytes, shape.slots)


def pages_to_share(make: Callable[[], Pages]) -> Pages | None:
    """Return the memory that `make` allocates; None, after a warning, where the device or the system has none that
    others can map. Ordinary memory serves then. Raise DeviceMemoryExhausted: ordinary memory has no more room."""
    try:
        return make()
    except (DeviceFailed, OSError) as wrong:
        _log.warning(
            "this engine shares no blocks, which decode workers get from the kvbm only: its memory cannot be shared"
            " with other processes: %s (kvbm.lending = false ends this warning)",
            wrong,
        )
        return None
