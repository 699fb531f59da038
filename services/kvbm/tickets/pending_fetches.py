"""Fetches that wait for the disk or for commits, and their later replies.

add ──▶ waiting ──the last block of the prefix has come, or will not──▶ last reply sent, forgotten
           │ ▲ │                                                            ▲
           │ └─┘ add_progress, send_progress: a reply for what has come     │
           └──── refuse: the ticket ended early, the reply says why ────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

from services.kvbm.tickets.errors import RefusalCode
from services.kvbm.tickets.packing import SlotChecksums, pack_slots
from services.kvbm.tickets.results import FetchProgress
from shared.messages import kvbm as wire

SendFetchReply = Callable[[wire.Fetched | wire.KvbmRefused, bool], None]
"""Sends a later reply to a fetch; the flag says whether it is the last one."""


class _PendingFetch(Struct):
    owner: str
    send: SendFetchReply
    progress: list[FetchProgress]
    """Progress that no reply has reported yet."""


class PendingFetches:
    """The waiting fetches of one layout, by ticket."""

    def __init__(self, generations: Callable[[bytes], bytes], checksums: SlotChecksums) -> None:
        """`generations` returns those of slots, both packed."""
        self._generations = generations
        self._checksums = checksums
        self._waiting: dict[int, _PendingFetch] = {}
        self.with_progress: set[int] = set()
        """Tickets with unreported progress; for reading only."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ticket: int, owner: str, send: SendFetchReply) -> None:
        """Add a fetch; its first reply is sent by the caller."""
        self._waiting[ticket] = _PendingFetch(owner, send, [])

    def add_progress(self, pieces: Iterable[FetchProgress]) -> None:
        """Add progress of some fetches, for the next `send_progress`."""
        for piece in pieces:
            self._waiting[piece.ticket].progress.append(piece)
            self.with_progress.add(piece.ticket)

    def send_progress(self) -> None:
        """Report all progress so far, in one reply for each run of slots from one tier."""
        for ticket in sorted(self.with_progress):
            pending = self._waiting[ticket]
            first, last = pending.progress[0].first, pending.progress[-1]
            ready = [pair for piece in pending.progress for pair in zip(piece.slots, piece.from_disk, strict=True)]
            pending.progress.clear()
            end = first + len(ready)
            complete = end == last.found
            if complete:
                del self._waiting[ticket]
            for disk, run in groupby(ready, itemgetter(1)) if ready else ((True, ()),):
                slots = [slot for slot, _ in run]
                reply = self.reply(ticket, last.time_left_s, first, slots, last.found, disk=disk)
                first += len(slots)
                pending.send(reply, complete and first == end)
        self.with_progress.clear()

    def refuse(self, ticket: int, code: RefusalCode, reason: str, *, owner: str | None = None) -> None:
        """End a fetch before its prefix is complete, with a refusal as its last reply. A ticket that does not wait, or
        is not `owner`'s, is ignored."""
        pending = self._waiting.get(ticket)
        if pending is not None and owner in (None, pending.owner):
            del self._waiting[ticket]
            self.with_progress.discard(ticket)
            pending.send(wire.KvbmRefused(code, f"ticket {ticket}: {reason}"), True)

    def refuse_all(self, owner: str | None, reason: str) -> None:
        """Refuse all fetches of the owner; None means of every owner."""
        for ticket in [ticket for ticket, pending in self._waiting.items() if owner in (None, pending.owner)]:
            self.refuse(ticket, "unknown_ticket", reason)

    def reply(
        self, ticket: int, time_left_s: float, first: int, slots: list[int], found: int, *, disk: bool
    ) -> wire.Fetched:
        """Return one reply: these slots can be read, as long as their generations stay as they are now."""
        packed = pack_slots(slots)
        generations, checksums = self._generations(packed), self._checksums.packed(slots)
        return wire.Fetched(ticket, time_left_s, first, packed, generations, disk, found, checksums)

    def validate(self) -> None:
        """Raise AssertionError if the fetches contradict themselves."""
        assert self.with_progress == {ticket for ticket, pending in self._waiting.items() if pending.progress}, (
            "progress is marked wrong"
        )
