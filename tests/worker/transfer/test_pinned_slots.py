from __future__ import annotations

import logging

import pytest

from services.worker.transfer.errors import PinRefused
from services.worker.transfer.pinned_slots import PinnedSlots

AT, SLOT_BYTES, SLOTS = 1 << 30, 8192, 10


class Registry:
    """Host memory that can be registered once, except for `refused` addresses."""

    def __init__(self, *refused: int) -> None:
        self.registered: dict[int, int] = {}
        self._refused = refused
        self._now_s = 0.0

    def register(self, address: int, size_bytes: int) -> None:
        if address in self._refused:
            raise PinRefused("no")
        assert address not in self.registered
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def clock(self) -> float:
        """Return the time; a second passes at each call."""
        self._now_s += 1.0
        return self._now_s

    def slots(self) -> PinnedSlots:
        """Make slots with four in each chunk."""
        return PinnedSlots(AT, SLOT_BYTES, SLOTS, self.register, self.unregister, self.clock, 4 * SLOT_BYTES + 5000)


def test_chunks_are_whole_slots_and_the_last_one_is_shorter() -> None:
    registry = Registry()
    slots = registry.slots()
    assert slots.chunks == 3
    assert all(slots.ensure_pinned(slot) for slot in range(SLOTS))
    slots.validate()
    assert registry.registered == {
        AT: 4 * SLOT_BYTES, AT + 4 * SLOT_BYTES: 4 * SLOT_BYTES, AT + 8 * SLOT_BYTES: 2 * SLOT_BYTES,
    }  # fmt: skip


def test_slots_larger_than_a_chunk_are_pinned_one_by_one() -> None:
    registry = Registry()
    slots = PinnedSlots(AT, SLOT_BYTES, 2, registry.register, registry.unregister, registry.clock, 4096)
    assert slots.chunks == 2
    assert slots.ensure_pinned(1)
    assert registry.registered == {AT + SLOT_BYTES: SLOT_BYTES}


def test_preparing_pins_chunks_that_no_copy_has_needed_yet() -> None:
    registry = Registry()
    slots = registry.slots()
    assert slots.ensure_pinned(0)
    assert slots.pin_next_chunk()
    assert not slots.pin_next_chunk()
    assert not slots.pin_next_chunk()
    slots.validate()
    assert len(registry.registered) == 3


def test_a_refused_chunk_is_logged_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(AT, AT + 4 * SLOT_BYTES)
    slots = registry.slots()
    with caplog.at_level(logging.WARNING):
        assert [slots.ensure_pinned(slot) for slot in (0, 1, 4, 8)] == [False, False, False, True]
    assert list(slots._pinned.values()).count(False) == 2
    assert not slots.all_pinned
    [record] = caplog.records
    assert "32768 bytes of the pool cannot be pinned (no)" in record.message
    assert "ulimit -l" in record.message
    assert "/dev/shm" in record.message


@pytest.mark.parametrize(("refused", "pinned"), [((), 10), ((AT,), 6), ((AT + 8 * SLOT_BYTES,), 8)])
def test_pinning_logs_its_begin_and_its_end(
    refused: tuple[int, ...], pinned: int, caplog: pytest.LogCaptureFixture
) -> None:
    slots = Registry(*refused).slots()
    with caplog.at_level(logging.INFO):
        while slots.pin_next_chunk():
            assert not slots.all_pinned
            slots.validate()
    slots.validate()
    assert slots.all_pinned == (not refused)
    messages = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert messages == [
        f"pinning {10 * SLOT_BYTES} bytes of the pool in 3 chunks",
        f"pinned {pinned * SLOT_BYTES} bytes of the pool in 3.00 s",
    ]


def test_releasing_unpins_what_was_pinned() -> None:
    registry = Registry(AT)
    slots = registry.slots()
    while slots.pin_next_chunk():
        slots.validate()
    slots.unpin_all()
    slots.validate()
    assert registry.registered == {}
    assert not slots.all_pinned
