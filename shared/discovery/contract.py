"""Who is alive: keys under leases, watched by everyone.

This file holds the contract. `shared/discovery/etcd.py`, `shared/discovery/file.py` and
`shared/discovery/memory.py` are the three back ends; all pass `tests/shared/discovery/test_contract.py`. A watcher that
is slow may see several changes of a key as one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal, Protocol

from msgspec import Struct


class Added(Struct, frozen=True, tag="added"):
    """A key was set, or set anew with another value."""

    key: str
    value: bytes


class Removed(Struct, frozen=True, tag="removed"):
    """A key is gone."""

    key: str


class Synced(Struct, frozen=True, tag="synced"):
    """Everything that was there when the watch began has been told. Comes exactly once."""


class LeftOut(Struct, frozen=True, tag="left_out"):
    """Keys that the watch leaves out: unreadable ones, and those beyond the limits of shared/discovery/intake.py."""

    count: int
    """How many since the last time; a new look at everything counts again what is still there."""
    key: str = ""
    """The latest one."""
    why: str = ""


Change = Added | Removed | Synced | LeftOut

Read = Callable[[str, bytes], object]
"""Raises ProtocolError where the watcher cannot read the value under the key. It may run in any thread."""

Entries = Callable[[int], Mapping[str, bytes]]
"""Epoch → all keys and values to publish under the lease of that epoch."""

Owner = Literal[
    "publishes",  # it answers, and the key is to be there
    "answers",  # it answers, and says nothing of the key
    "silent",  # no answer, or no way to ask
    "gone",  # there is no owner, or it took the key away itself
]
"""What asking the owner of a key came to."""

Alive = Callable[[str, bytes], Awaitable[Owner]]
"""(key, value) → what its owner says. Asked for keys that are missing: after an outage, or deleted in plain sight."""


class Registration(Protocol):
    """A lease and the keys under it, kept alive and, when the lease is lost, granted and published anew."""

    @property
    def epoch(self) -> int:
        """1 at first; one more each time a lease was lost and granted again."""
        ...

    async def publish(self) -> None:
        """Ask `entries` again and publish what changed; keys it no longer names are deleted. Returns when that is
        done; while the back end is away this keeps trying."""
        ...

    async def close(self) -> None:
        """Revoke: the keys are gone when this returns (or by their TTL, if the back end is away). Idempotent."""
        ...


class Discovery(Protocol):
    """One back end."""

    async def register(self, entries: Entries) -> Registration:
        """Publish `entries(1)` under a new lease. While the back end is away this keeps trying, with jitter."""
        ...

    def watch(self, prefix: str, *, alive: Alive | None = None, read: Read | None = None) -> AsyncIterator[Change]:
        """Every key below `prefix`, then Synced, then each change, for ever. An outage shows nothing: after it, keys
        that a re-list misses stay for one TTL and are removed only if `alive` finds their owner gone too (or is not
        given). A key that is seen to go stays only where `alive`, asked at once, says that its owner publishes it. A
        key that `read` refuses is taken for none, and counted."""
        ...

    def publishes(self, key: str) -> bool:
        """Whether a registration made here wants the key to be there; from before it is there until before it goes."""
        ...

    async def list(self, prefix: str) -> dict[str, bytes]:
        """What is there now, within the same limits; what is beyond is counted in the log. Raises DiscoveryDown."""
        ...

    async def close(self) -> None:
        """Ends watches and threads. Registrations are closed by their owners first."""
        ...
