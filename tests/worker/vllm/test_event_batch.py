"""services/worker/vllm/event_batch.py: events that are known, that a newer vLLM has, and that are none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.worker.vllm.event_batch import decode_events
from shared.messages.kv_events import AllBlocksCleared, BlockRemoved

REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
NEWER = {"type": "TierBlocksCleared", "medium": "GPU"}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.5, list(events), 0])


def test_known_events_come_with_the_fields_that_are_read_of_them() -> None:
    assert decode_events(batch(REMOVED, {"type": "AllBlocksCleared"})) == [
        BlockRemoved([1], medium="GPU"),
        AllBlocksCleared(),
    ]
    assert decode_events(batch(REMOVED | {"added_later": [1, {"a": 2}]})) == [BlockRemoved([1], medium="GPU")]


def test_an_event_of_an_unknown_type_forgets_all_blocks_and_those_next_to_it_count() -> None:
    assert decode_events(batch(REMOVED, NEWER, REMOVED)) == [
        BlockRemoved([1], medium="GPU"),
        AllBlocksCleared(),
        BlockRemoved([1], medium="GPU"),
    ]


@pytest.mark.parametrize(
    "event", [["BlockRemoved", [1]], {"block_hashes": [1]}, {"type": 3}, {"type": "BlockRemoved", "block_hashes": "x"}]
)
def test_what_is_no_event_is_refused(event: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_events(batch(event))
    with pytest.raises(msgspec.ValidationError):
        decode_events(batch(NEWER, event))
