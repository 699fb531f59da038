"""What happened lately to the blocks of one layout, in words, for `headrace explain block`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.kvbm.metrics import EvictionReason
from services.kvbm.tiers.actions import TierEvent
from shared.blocks import Content, ContentStored
from shared.hashing import ContentKey
from shared.messages.control import Note
from shared.messages.kv_events import Tier
from shared.notes import NoteLog

BLOCK_NOTES = 8192
"""Most notes of one layout: 2 MB."""
_STORED: dict[Tier, str] = {"host": "stored in host memory", "disk": "written to disk"}
_EVICTED: dict[tuple[Tier, EvictionReason], str] = {
    ("host", "room"): "evicted from host memory: the policy chose it to make room",
    ("disk", "room"): "evicted from disk: the policy chose it to make room",
    ("host", "discarded"): "discarded from host memory: an engine found that it may be wrong",
    ("disk", "discarded"): "discarded from disk: an engine found that it may be wrong",
    ("host", "lost"): "discarded from host memory: its bytes were damaged",
    ("disk", "lost"): "lost on disk: the record does not have its bytes",
    ("host", "disk gone"): "evicted from host memory: the disk has failed",
    ("disk", "disk gone"): "no longer on disk: the disk has failed",
}


class LayoutNotes:
    """Times are seconds on the loop's clock."""

    def __init__(self) -> None:
        self._log: NoteLog[ContentKey] = NoteLog(BLOCK_NOTES)

    def changed(self, events: Iterable[TierEvent], why: EvictionReason, now_s: float) -> None:
        """Note blocks that can be found from now on, or no longer."""
        for tier, event in events:
            text = _STORED[tier] if isinstance(event, ContentStored) else _EVICTED[tier, why]
            self._log.add(event.content.key, text, now_s)

    def declined(self, contents: Sequence[Content], indices: Iterable[int], why: str, now_s: float) -> None:
        """Note blocks that an engine offered and that got no slot."""
        for index in indices:
            self._log.add(contents[index].key, "offered by an engine and not taken: {}", now_s, name=why)

    def find(self, key_end: bytes, now_s: float) -> list[Note]:
        """Return the notes about a block, by the end of its key, oldest first."""
        return self._log.find(lambda key: key.endswith(key_end), now_s)
