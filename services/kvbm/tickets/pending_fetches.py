"""Fetches that wait for the disk, and what they are told: many reads end at once, and few replies say so.

add ──▶ waiting ──the last of the prefix has come, or it has none──▶ told its last reply, forgotten
           │ ▲ │                                                            ▲
           │ └─┘ advance, tell: a reply for what has come                   │
           └──── end: its ticket has ended otherwise, and it hears why ─────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

from services.kvbm.tickets.errors import RefusalCode
from services.kvbm.tickets.packing import SlotChecksums, pack_slots
from services.kvbm.tickets.results import FetchProgress
from shared import kvbm_messages as wire
from shared.pool.map import ArenaMap

SendFetchReply = Callable[[wire.Fetched | wire.KvbmRefused, bool], None]
"""A later reply to a fetch, and whether it is the last one."""


class _PendingFetch(Struct):
    owner: str
    told: SendFetchReply
    news: list[FetchProgress]
    """What it does not know yet."""


class PendingFetches:
    """Of one layout, by ticket."""

    def __init__(self, slots: ArenaMap, checksums: SlotChecksums) -> None:
        self._slots = slots
        self._checksums = checksums
        self._waiting: dict[int, _PendingFetch] = {}
        self.with_progress: set[int] = set()
        """Tickets with news; for reading only."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ticket: int, owner: str, told: SendFetchReply) -> None:
        """Its first reply is the caller's."""
        self._waiting[ticket] = _PendingFetch(owner, told, [])

    def add_progress(self, pieces: Iterable[FetchProgress]) -> None:
        """News of some of them, to be told at the next `tell`."""
        for piece in pieces:
            self._waiting[piece.ticket].news.append(piece)
            self.with_progress.add(piece.ticket)

    def send_progress(self) -> None:
        """All news so far: a reply for each run of slots from one tier."""
        for ticket in sorted(self.with_progress):
            asker = self._waiting[ticket]
            first, last = asker.news[0].first, asker.news[-1]
            came = [pair for piece in asker.news for pair in zip(piece.slots, piece.from_disk, strict=True)]
            asker.news.clear()
            end = first + len(came)
            complete = end == last.found
            if complete:
                del self._waiting[ticket]
            for disk, run in groupby(came, itemgetter(1)) if came else ((True, ()),):
                slots = [slot for slot, _ in run]
                reply = fetch_reply(
                    self._slots, self._checksums, ticket, last.time_left_s, first, slots, last.found, disk=disk
                )
                first += len(slots)
                asker.told(reply, complete and first == end)
        self.with_progress.clear()

    def refuse(self, ticket: int, code: RefusalCode, reason: str, *, owner: str | None = None) -> None:
        """The ticket has ended before its prefix was there. Those that do not wait, or are not `owner`'s, are
        ignored."""
        asker = self._waiting.get(ticket)
        if asker is not None and owner in (None, asker.owner):
            del self._waiting[ticket]
            self.with_progress.discard(ticket)
            asker.told(wire.KvbmRefused(code, f"ticket {ticket}: {reason}"), True)

    def refuse_all(self, owner: str | None, reason: str) -> None:
        """All tickets of the owner; None: of everybody."""
        for ticket in [ticket for ticket, asker in self._waiting.items() if owner in (None, asker.owner)]:
            self.refuse(ticket, "unknown_ticket", reason)

    def validate(self) -> None:
        """Raises AssertionError where the askers contradict themselves."""
        assert self.with_progress == {ticket for ticket, asker in self._waiting.items() if asker.news}, (
            "news for nobody"
        )


def fetch_reply(
    memory: ArenaMap,
    checksums: SlotChecksums,
    ticket: int,
    time_left_s: float,
    first: int,
    slots: list[int],
    found: int,
    *,
    disk: bool,
) -> wire.Fetched:
    """One reply: these slots can be read, as long as their generations stay what they are now."""
    packed = pack_slots(slots)
    generations = memory.generations(packed)
    return wire.Fetched(ticket, time_left_s, first, packed, generations, disk, found, checksums.packed(slots))
