"""Sharing: which blocks of this process others may be reading, and when their slots may be used again. Pure.

    reader   admit ──▶ connected ──connection_closed──▶ silent ──proven_dead──▶ gone
                         │   ▲                            │
                         │   └───────── admit again ──────┘     what it had before has ended
                         └──leave──▶ gone

    share     open_share ──▶ waiting ── add, until its last block ──▶ shared
                               │ no further block for QUIET_S         │
                               └──────────────────────────────────────┤ release, or its reader is gone or admitted again
                                                                      ▼
                                                           returned: its slots may change

No clock returns a slot. A reader that is stopped may go on and read; its GPU may be reading at this moment. So a slot
is returned when the reader says that it has ended, or when the kernel's lock proves that the reader is dead.

docs/decisions/0075 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from services.worker.sharing.messages import RefusalCode
from shared.errors import HeadraceError
from shared.hashing import ContentKey

QUIET_S = 10.0
"""Seconds for which a share waits for its next block. A step with a part of a prompt takes a fraction of a second."""


MOST_WHOLE = 64
"""The most shares that are remembered after all their blocks were shared."""


class SharingRefused(HeadraceError):
    """The sharer does not do what was asked."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code: RefusalCode = code


class SharingLimits(Struct, frozen=True):
    """How much may be shared at once."""

    readers: int = 16
    shares: int = 8
    """Shares of each reader."""
    blocks: int = 4096
    """Blocks of all shares, those included that they still wait for; one that is shared twice counts twice."""


class SlotShare(Struct):
    """Blocks that one reader has asked for."""

    reader: str
    keys: Sequence[ContentKey]
    quiet_s: float
    """When it ends to wait."""
    slots: list[int] = field(default_factory=list)
    """The slots of the blocks that are shared: leading ones of `keys`."""
    waits: bool = True
    """Whether further blocks will be shared."""


class Reader(Struct):
    """A process that has mapped this process's memory."""

    connection: int | None
    """None if its connection is closed, and it may still read."""
    shares: dict[int, SlotShare] = field(default_factory=dict)
    """The shares by their numbers."""


class Shares:
    """All readers of one exported memory, by the names of their kernel locks."""

    def __init__(self, limits: SharingLimits) -> None:
        self.limits = limits
        self.closing = False
        self._readers: dict[str, Reader] = {}
        self._owners: dict[int, str] = {}
        """Connection → its reader."""
        self.blocks = 0
        """The blocks of all shares, those included that they wait for."""
        self._whole: dict[ContentKey, str] = {}
        """Last block of each share that was shared whole → its reader, the newest at the end, at most MOST_WHOLE; also
        of shares that were released."""

    @property
    def readers(self) -> list[str]:
        """The names of all readers that are not gone."""
        return list(self._readers)

    @property
    def may_free(self) -> bool:
        """Whether no other process has mapped the memory or ever will."""
        return self.closing and not self._readers

    def admit(self, connection: int, owner: str) -> list[int]:
        """Admit a reader. Return the slots of shares that it had before. Raise SharingRefused."""
        assert connection not in self._owners
        if self.closing:
            raise SharingRefused("closing", "the sharer shares nothing more")
        before = self._readers.get(owner)
        if before is None and len(self._readers) >= self.limits.readers:
            raise SharingRefused("limit", f"there are {len(self._readers)} readers already")
        slots = self._end(owner)
        self._readers[owner] = Reader(connection)
        self._owners[connection] = owner
        return slots

    def open_share(self, connection: int, number: int, keys: Sequence[ContentKey], now_s: float) -> None:
        """Begin a share of these blocks, none of which is shared yet. Raise SharingRefused if it would be too
        much."""
        owner = self._owners[connection]
        shares = self._readers[owner].shares
        if self.closing:
            raise SharingRefused("closing", "the sharer shares nothing more")
        if number in shares:
            raise SharingRefused("limit", f"share {number} has not ended")
        if len(shares) >= self.limits.shares:
            raise SharingRefused("limit", f"the reader has {len(shares)} shares already")
        if self.blocks + len(keys) > self.limits.blocks:
            raise SharingRefused("limit", f"{self.blocks} blocks of at most {self.limits.blocks} are shared already")
        shares[number] = SlotShare(owner, keys, now_s + QUIET_S)
        self.blocks += len(keys)

    def waiting(self) -> list[tuple[int, int, SlotShare]]:
        """Return connection, number and share of each share that waits for blocks."""
        return [
            (connection, number, share)
            for connection, owner in self._owners.items()
            for number, share in self._readers[owner].shares.items()
            if share.waits
        ]

    def is_shared(self, key: ContentKey) -> bool:
        """Return whether this is the last block of a share: it was shared lately, or will be as soon as it is there."""
        return key in self._whole or any(share.keys[-1] == key for _, _, share in self.waiting())

    def add(self, share: SlotShare, slots: Sequence[int], now_s: float) -> bool:
        """Record that these slots are shared, too. Return whether that is news for the reader: blocks, or that no more
        will come."""
        assert share.waits
        share.slots.extend(slots)
        if slots:
            share.quiet_s = now_s + QUIET_S
        whole = len(share.slots) == len(share.keys)
        share.waits = not whole and now_s < share.quiet_s
        if whole:
            self._whole.pop(share.keys[-1], None)
            self._whole[share.keys[-1]] = share.reader
            if len(self._whole) > MOST_WHOLE:
                del self._whole[next(iter(self._whole))]
        return bool(slots) or not share.waits

    def release(self, connection: int, number: int) -> list[int]:
        """End a share of this connection's reader; return its slots. An unknown one has none."""
        share = self._readers[self._owners[connection]].shares.pop(number, None)
        if share is None:
            return []
        self.blocks -= len(share.keys)
        return share.slots

    def leave(self, connection: int) -> list[int]:
        """End a reader that has nothing mapped any more; return the slots of all its shares."""
        return self._end(self._owners[connection])

    def connection_closed(self, connection: int) -> None:
        """Record that a reader says nothing any more. Its shares go on: that proves nothing about what it reads."""
        owner = self._owners.pop(connection, None)
        if owner is not None:
            self._readers[owner].connection = None
            self._forget_whole(owner)

    def proven_dead(self, owner: str) -> list[int]:
        """End a reader whose kernel lock is free; return the slots of all its shares."""
        return self._end(owner)

    def close(self) -> list[int]:
        """Share nothing more. Return the connections of readers, which are to leave."""
        self.closing = True
        for _, _, share in self.waiting():
            share.waits = False
        return list(self._owners)

    def end_all(self) -> list[int]:
        """End all readers; return the slots of all shares. The connections are closed, so that no reader believes what
        it reads from now on."""
        return [slot for owner in list(self._readers) for slot in self._end(owner)]

    def _forget_whole(self, owner: str) -> None:
        self._whole = {key: reader for key, reader in self._whole.items() if reader != owner}

    def _end(self, owner: str) -> list[int]:
        reader = self._readers.pop(owner, None)
        if reader is None:
            return []
        self._forget_whole(owner)
        if reader.connection is not None:
            del self._owners[reader.connection]
        self.blocks -= sum(len(share.keys) for share in reader.shares.values())
        return [slot for share in reader.shares.values() for slot in share.slots]

    def validate(self) -> None:
        """Raise AssertionError if the shares contradict themselves."""
        shares = [share for reader in self._readers.values() for share in reader.shares.values()]
        assert self.blocks == sum(len(share.keys) for share in shares) <= self.limits.blocks
        assert all(len(share.slots) <= len(share.keys) for share in shares)
        assert len(self._readers) <= self.limits.readers
        assert len(self._whole) <= MOST_WHOLE
        assert set(self._whole.values()) <= set(self._owners.values()), "a reader that is gone has blocks"
        assert all(len(reader.shares) <= self.limits.shares for reader in self._readers.values())
        connected = {name: reader.connection for name, reader in self._readers.items() if reader.connection is not None}
        assert {owner: connection for connection, owner in self._owners.items()} == connected
