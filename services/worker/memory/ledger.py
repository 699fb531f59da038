"""Ledger: which weights are there, which engine makes them, and which map them. Pure.

    empty ──AskWeights──▶ written ──CommitWeights──▶ committed ──its last reader goes──▶ unmapped
                          │ one writer, others wait   many readers ◀──AskWeights──────────┘ │
                          │                                                                 │ `keep_s`, `free`, or
                          │ the writer goes, commits no proper                              │ room is needed
                          │ memory, or takes longer than `write_s`                          ▼
                          └──▶ the next that waits writes, or empty                       empty

A connection is a lock: it writes, waits or reads as long as it is open, and does one of these for one identity. The
memory belongs to its writer until it is committed, so that nothing is left of a writer that dies.

docs/decisions/0079 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from services.worker.memory.messages import (
    PROTOCOL,
    AskWeights,
    FromService,
    MapWeights,
    NotMapped,
    RefusedWeights,
    WaitForWriter,
    WeightsFreed,
    WeightsIdentity,
    WeightsRow,
    WeightsShown,
    WriteWeights,
)

MOST_WEIGHTS = 64
"""The most weights at once, written ones included."""


class LedgerLimits(Struct, frozen=True):
    """How much is kept, and for how long."""

    size_bytes: int
    """Bytes of all weights, those included that are being written."""
    keep_s: float = 0.0
    """Seconds that weights stay which no engine maps. 0 means until room is needed."""
    write_s: float = 1800.0
    """Seconds that an engine may write."""


class SendPacket(Struct, frozen=True):
    """Send a message. With `memory` the descriptors of that number go with it."""

    connection: int
    message: FromService
    memory: int | None = None


class KeepMemory(Struct, frozen=True):
    """Keep the descriptors that came with the commit, under this number."""

    memory: int


class ReleaseMemory(Struct, frozen=True):
    """Close the descriptors of this number."""

    memory: int


class CloseConnection(Struct, frozen=True):
    """Close a connection, of which the ledger knows nothing any more."""

    connection: int


LedgerAction = SendPacket | KeepMemory | ReleaseMemory | CloseConnection


class _Entry(Struct):
    """The weights of one identity."""

    number: int
    name: str
    identity: WeightsIdentity
    size_bytes: int
    writer: int | None
    """The connection that writes. None if they are committed."""
    write_until_s: float = 0.0
    readers: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Connections that wait for the writer, the first to come first."""
    unmapped_s: float | None = None
    """When its last reader went. None if there are readers, or it is written."""


class Ledger:
    """All weights, by their identities."""

    def __init__(self, limits: LedgerLimits) -> None:
        self.limits = limits
        self._entries: dict[WeightsIdentity, _Entry] = {}
        self._connections: dict[int, WeightsIdentity] = {}
        """Connection → the weights that it writes, waits for or reads."""
        self._newest = 0
        """The number of the newest memory."""

    @property
    def used_bytes(self) -> int:
        """The bytes of all weights, those included that are being written."""
        return sum(entry.size_bytes for entry in self._entries.values())

    def written_bytes(self, connection: int) -> int:
        """Return the size of the weights that a connection writes. 0 if it writes none."""
        identity = self._connections.get(connection)
        entry = None if identity is None else self._entries[identity]
        return entry.size_bytes if entry is not None and entry.writer == connection else 0

    def ask(self, connection: int, asked: AskWeights, now_s: float) -> list[LedgerAction]:
        """Answer an engine. A connection asks only once."""
        if connection in self._connections:
            return self._refuse(connection, "protocol", "a connection asks once", now_s)
        if asked.protocol != PROTOCOL:
            return self._refuse(
                connection, "protocol", f"protocol {asked.protocol}, the memory service has {PROTOCOL}", now_s
            )
        entry = self._entries.get(asked.identity)
        if entry is not None:
            return self._join(connection, entry, asked, now_s)
        room = self._room_for(asked.size_bytes)
        if room is None:
            return self._refuse(connection, "full", self._full(asked.size_bytes), now_s)
        self._newest += 1
        until_s = now_s + self.limits.write_s
        self._entries[asked.identity] = _Entry(
            self._newest, asked.name, asked.identity, asked.size_bytes, connection, until_s
        )
        self._connections[connection] = asked.identity
        return [*room, SendPacket(connection, WriteWeights())]

    def commit(self, connection: int, identity: WeightsIdentity, fault: str, now_s: float) -> list[LedgerAction]:
        """Take the weights that a writer has made. `fault` says what is wrong with its memory. Empty if nothing is."""
        entry = self._entries.get(self._connections.get(connection, identity))
        if entry is None or entry.writer != connection:
            return self._refuse(connection, "protocol", "only the writer commits", now_s)
        if entry.identity != identity:
            fault = f"weights of {identity.model}/{identity.layout}, asked for were those of {entry.identity.model}"
        if fault:
            return self._refuse(connection, "memory", fault, now_s)
        mapped = MapWeights(identity, entry.size_bytes)
        waiting, entry.waiting, entry.writer = entry.waiting, [], None
        entry.readers = [connection, *waiting]
        sent = [SendPacket(each, mapped, entry.number) for each in waiting]
        return [KeepMemory(entry.number), SendPacket(connection, mapped), *sent]

    def connection_closed(self, connection: int, now_s: float) -> list[LedgerAction]:
        """Take away what a connection has, which has ended for whatever reason."""
        identity = self._connections.pop(connection, None)
        if identity is None:
            return []
        entry = self._entries[identity]
        if entry.writer == connection:
            return self._hand_on(entry, now_s)
        if connection in entry.waiting:
            entry.waiting.remove(connection)
            return []
        entry.readers.remove(connection)
        if not entry.readers:
            entry.unmapped_s = now_s
        return []

    def tick(self, now_s: float) -> list[LedgerAction]:
        """Release what was unmapped for long enough, and end writers that are too slow."""
        actions: list[LedgerAction] = []
        for entry in list(self._entries.values()):
            if entry.writer is not None and entry.write_until_s <= now_s:
                reason = f"the weights were not complete after {self.limits.write_s:g} s"
                actions += self._refuse(entry.writer, "slow", reason, now_s)
            elif self.limits.keep_s and entry.unmapped_s is not None and entry.unmapped_s + self.limits.keep_s <= now_s:
                actions.append(self._release(entry))
        return actions

    @property
    def due_s(self) -> float | None:
        """When `tick` has something to do, if nothing else happens before. None if never."""
        writing = [entry.write_until_s for entry in self._entries.values() if entry.writer is not None]
        unmapped = [entry.unmapped_s for entry in self._unmapped() if entry.unmapped_s is not None]
        kept = [since_s + self.limits.keep_s for since_s in unmapped] if self.limits.keep_s else []
        return min((*writing, *kept), default=None)

    def free(self, connection: int, model: str) -> list[LedgerAction]:
        """Release the weights of a model, or all, that no engine maps."""
        named = [
            entry
            for entry in self._entries.values()
            if not model or entry.name == model or entry.identity.model.startswith(model)
        ]
        held = tuple(entry.name or entry.identity.model for entry in named if entry.unmapped_s is None)
        unmapped = [entry for entry in named if entry.unmapped_s is not None]
        freed = WeightsFreed(sum(entry.size_bytes for entry in unmapped), held)
        return [*(self._release(entry) for entry in unmapped), SendPacket(connection, freed)]

    def show(self, pids: dict[int, int]) -> WeightsShown:
        """Return what is there. `pids` has the process of each connection."""

        def processes(connections: list[int]) -> tuple[int, ...]:
            return tuple(sorted(pids.get(connection, 0) for connection in connections))

        rows = [
            WeightsRow(
                entry.name,
                entry.identity,
                "committed" if entry.writer is None else "written",
                entry.size_bytes,
                0 if entry.writer is None else pids.get(entry.writer, 0),
                processes(entry.readers),
                processes(entry.waiting),
            )
            for entry in self._entries.values()
        ]
        return WeightsShown(self.limits.size_bytes, tuple(rows))

    def _join(self, connection: int, entry: _Entry, asked: AskWeights, now_s: float) -> list[LedgerAction]:
        """Let an engine read weights that are there, or wait for them."""
        if entry.size_bytes != asked.size_bytes:
            reason = f"the weights have {entry.size_bytes} bytes, asked for were {asked.size_bytes}"
            return self._refuse(connection, "size", reason, now_s)
        self._connections[connection] = entry.identity
        if entry.writer is not None:
            entry.waiting.append(connection)
            return [SendPacket(connection, WaitForWriter())]
        entry.readers.append(connection)
        entry.unmapped_s = None
        return [SendPacket(connection, MapWeights(entry.identity, entry.size_bytes), entry.number)]

    def _room_for(self, size_bytes: int) -> list[LedgerAction] | None:
        """Release what no engine maps, the longest unmapped first, until there is room. None if that is not enough."""
        free_bytes, places = self.limits.size_bytes - self.used_bytes, MOST_WEIGHTS - len(self._entries)
        leaving: list[_Entry] = []
        unmapped = iter(sorted(self._unmapped(), key=lambda entry: entry.unmapped_s or 0.0))
        while free_bytes < size_bytes or places < 1:
            entry = next(unmapped, None)
            if entry is None:
                return None
            leaving.append(entry)
            free_bytes, places = free_bytes + entry.size_bytes, places + 1
        return [self._release(entry) for entry in leaving]

    def _full(self, size_bytes: int) -> str:
        if len(self._entries) >= MOST_WEIGHTS:
            return f"there are weights of {MOST_WEIGHTS} models already"
        mapped_bytes = self.used_bytes - sum(entry.size_bytes for entry in self._unmapped())
        return (
            f"no room for {size_bytes} bytes: engines use {mapped_bytes} of the {self.limits.size_bytes} bytes of"
            " size_bytes of the memory service"
        )

    def _unmapped(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries.values() if entry.unmapped_s is not None)

    def _release(self, entry: _Entry) -> LedgerAction:
        del self._entries[entry.identity]
        return ReleaseMemory(entry.number)

    def _hand_on(self, entry: _Entry, now_s: float) -> list[LedgerAction]:
        """Let the next engine write, after the writer has gone."""
        if not entry.waiting:
            del self._entries[entry.identity]
            return []
        entry.writer, *entry.waiting = entry.waiting
        entry.write_until_s = now_s + self.limits.write_s
        return [SendPacket(entry.writer, WriteWeights())]

    def _refuse(self, connection: int, code: RefusedWeights, reason: str, now_s: float) -> list[LedgerAction]:
        refused = SendPacket(connection, NotMapped(code, reason))
        return [refused, CloseConnection(connection), *self.connection_closed(connection, now_s)]

    def validate(self) -> None:
        """Raise AssertionError if the ledger contradicts itself."""
        assert self.used_bytes <= self.limits.size_bytes
        assert len(self._entries) <= MOST_WEIGHTS
        numbers = [entry.number for entry in self._entries.values()]
        assert len(set(numbers)) == len(numbers)
        locked: dict[int, WeightsIdentity] = {}
        for identity, entry in self._entries.items():
            assert entry.identity == identity
            assert (entry.writer is None) or not entry.readers, "weights that are written have no readers"
            assert (entry.writer is not None) or not entry.waiting, "committed weights let nothing wait"
            assert (entry.unmapped_s is None) == (entry.writer is not None or bool(entry.readers))
            writer = [] if entry.writer is None else [entry.writer]
            for connection in (*writer, *entry.readers, *entry.waiting):
                assert connection not in locked, "a connection is one lock"
                locked[connection] = identity
        assert locked == self._connections
