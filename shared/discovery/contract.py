"""Discovery: keys under leases, which every process watches to know which processes live.

This file is the contract. `shared/discovery/etcd.py` and `shared/discovery/file.py` are the back ends, and
`shared/discovery/memory.py` is one inside one process; all of them pass `tests/shared/discovery/test_contract.py`. A
slow watcher may see several changes of a key as one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal, Protocol

from msgspec import Struct


class KeyAdded(Struct, frozen=True, tag="added"):
    """A key was set, for the first time or to another value."""

    key: str
    value: bytes


class KeyRemoved(Struct, frozen=True, tag="removed"):
    """A key was removed."""

    key: str


class Synced(Struct, frozen=True, tag="synced"):
    """Every key that was there when the watch began has been reported. This comes exactly once."""


class LeftOut(Struct, frozen=True, tag="left_out"):
    """Keys that the watch leaves out: unreadable ones, and those over the limits of shared/discovery/intake.py."""

    count: int
    """The number of keys since the last LeftOut. A new listing counts those again that are still there."""
    key: str = ""
    """The latest of these keys."""
    why: str = ""
    """Why that key was left out."""


Change = KeyAdded | KeyRemoved | Synced | LeftOut

Read = Callable[[str, bytes], object]
"""Checks (key, value), and raises ProtocolError if the watcher cannot read the value. It may run in any thread."""

Entries = Callable[[int], Mapping[str, bytes]]
"""Returns all keys and values to publish under the lease of an epoch."""

OwnerAnswer = Literal[
    "publishes",  # it answers, and still publishes the key
    "answers",  # it answers, but does not say whether it publishes the key
    "silent",  # it does not answer, or cannot be asked
    "gone",  # there is no such process, or it has removed the key itself
]
"""The answer of a key's owner."""

AskOwner = Callable[[str, bytes], Awaitable[OwnerAnswer]]
"""Asks the owner of (key, value) whether it lives. Called for missing keys: after an outage, or deleted in sight."""


class Registration(Protocol):
    """A lease and the keys under it. A lost lease is granted again, and its keys are published again."""

    @property
    def epoch(self) -> int:
        """The number of leases so far: 1 at first, one more each time a lost lease is granted again."""
        ...

    async def publish(self) -> None:
        """Call `entries` again, publish what changed, and delete keys that it no longer names.

        Return when that is done. While the back end is away, keep trying."""
        ...

    async def close(self) -> None:
        """Revoke the lease. Its keys are removed on return, or after their TTL if the back end is away. Idempotent."""
        ...


class Discovery(Protocol):
    """One process's endpoint at a back end."""

    async def register(self, entries: Entries) -> Registration:
        """Publish `entries(1)` under a new lease. While the back end is away, keep trying, with jitter."""
        ...

    def watch(
        self, prefix: str, *, ask_owner: AskOwner | None = None, read: Read | None = None
    ) -> AsyncIterator[Change]:
        """Yield every key below `prefix`, then Synced, then each change, without end.

        An outage yields nothing. After it, a key that the new listing lacks stays for one TTL, and is removed only if
        `ask_owner` says that its owner is gone too (or is not given). When a key is deleted in sight, `ask_owner` is
        called at once: the key stays while its owner publishes it, and for one TTL if its owner is silent. A key that
        `read` refuses counts as absent, and is reported in LeftOut.
        """
        ...

    def publishes(self, key: str) -> bool:
        """Return whether a registration made here publishes the key: from before it is set until before it is
        removed."""
        ...

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return the keys and values below `prefix` now, within the same limits; the log counts those over the limits.

        Raise DiscoveryDown.
        """
        ...

    async def close(self) -> None:
        """End watches and threads. Owners close their registrations before."""
        ...
