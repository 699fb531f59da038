"""DeviceBlocks: the engine's blocks as the connector sees them: which are copied, where to, and when. Pure.

    to the kvbm      offers ──▶ pin ──▶ the copy ──▶ unpin           asked_again ──▶ pin …
    from the kvbm    fetch_changes ──▶ begin_load ──▶ the copies ──▶ end_loads ──▶ end_fetch

`services.worker.scheduler.kv_cache_manager` is the native engine's; `services.worker.vllm.connector.blocks` is vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from shared.blocks import Content
from shared.hashing import ContentKey

PREFETCHES = 4
"""Most fetches at once for which no sequence waits yet."""


class FetchRequest(Struct, frozen=True):
    """Blocks that are missing on the device, and that a sequence waits for."""

    number: int
    """Names the fetch in `begin_load`, `end_loads` and `end_fetch`. Each fetch ends with exactly one `end_fetch`."""
    keys: list[ContentKey]
    """Content keys in the order of the chain, from the first missing block on."""
    trace: str = ""
    """`Submit.trace` of the attempt that waits. Empty if it is not traced, or if no attempt waits."""
    awaits: bool = False
    """Whether blocks that are not stored yet are waited for: another engine is computing them."""
    sharer: str = ""
    """Instance id of the worker whose engine is computing them, which may share them. Empty if not known."""


class DeviceBlocks(Protocol):
    """The blocks of one engine."""

    def set_connected(self, connected: bool) -> None:
        """A kvbm is there, or no longer. Without one nothing is offered, and no sequence waits for blocks: fetches that
        were open are abandoned, each of which still ends with `end_fetch`, after `end_loads` for each block that is
        loading."""
        ...

    def offers(self, most: int) -> list[Content]:
        """Return at most `most` blocks to offer to the kvbm, parents first. An offer holds nothing."""
        ...

    def declined(self, keys: Sequence[ContentKey]) -> None:
        """The kvbm has these offered blocks already, or does not take them."""
        ...

    def asked_again(self, keys: Sequence[ContentKey]) -> None:
        """The kvbm is asked once more for these blocks, which came too late. `pin` or `declined` follows for each."""
        ...

    def pin(self, keys: Sequence[ContentKey]) -> list[int | None]:
        """Return the device slots with these blocks, each held for a copy until `unpin`. None if the block was evicted,
        or its room is needed."""
        ...

    def unpin(self, slots: Sequence[int]) -> None:
        """The copies that read these slots have ended. Called exactly once for each pin, parents before children."""
        ...

    def fetch_changes(self) -> tuple[list[FetchRequest], list[int]]:
        """Return what to fetch, and the numbers of fetches that no sequence waits for any longer, both new since the
        last call. None of the abandoned fetches has ended. Copies for them that have not begun are not worth making;
        every slot that `begin_load` gave still needs its `end_loads`."""
        ...

    def begin_load(self, number: int, first: int, count: int, found: int, /) -> list[int] | None:
        """Return device slots for blocks first … first + count - 1 of fetch `number`, of which the kvbm has `found`;
        leading ones only. They are fewer, or none, if there is no room, if the fetch was abandoned, or if a block
        before them got no slot. None if it is not known yet which slots; to be asked again each step."""
        ...

    def end_loads(self, number: int, first: int, good: Sequence[bool], disk: bool, sharer: str = "", /) -> None:
        """The copies of blocks first … first + len(good) - 1 of fetch `number` have ended, each good or not; `sharer`
        is the worker that shared them, empty for the kvbm. Called once for each slot of `begin_load`, in any order,
        also after the attempt has ended."""
        ...

    def end_fetch(self, number: int, round_trip_s: float, /) -> None:
        """Nothing more comes for fetch `number`, and all its loads have ended. Called exactly once for each fetch.
        `round_trip_s` is the time from the question to the kvbm's first answer, or until no answer was awaited any
        longer. 0 if not known."""
        ...

    def offer_shared(self, sharer: str, /) -> None:
        """The engine of the worker `sharer` shares nothing any more, and may not have stored what it shared: offer that
        to the kvbm."""
        ...

    def discard(self, keys: Sequence[ContentKey]) -> None:
        """The kvbm may have these blocks, and they are or may be wrong."""
        ...

    def new_discards(self) -> list[ContentKey]:
        """Return the keys of blocks that are or may be wrong, new since the last call: the kvbm must no longer hand
        them out."""
        ...
