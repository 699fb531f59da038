"""The replay buffer and its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import replay_buffer
from shared.bus.replay_buffer import ReplayBuffer, ReplayedBatches
from shared.errors import ProtocolError


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 3), st.binary(max_size=20)), max_size=30),
    st.integers(0, 60),
)
def test_a_ring_holds_the_newest_batches_that_fit(
    limit_batches: int, limit_bytes: int, batches: list[tuple[int, bytes]], first: int
) -> None:
    ring = ReplayBuffer(limit_batches, limit_bytes)
    published: list[tuple[int, bytes]] = []
    sequence = 0
    for step, payload in batches:
        sequence += step
        published.append((sequence, payload))
        ring.append(sequence, payload)
        ring.validate()
        held = ring.since(0)
        assert held == published[-len(held) :]
        one_more = published[-len(held) - 1 :]
        size_bytes = sum(len(each) for _, each in one_more)
        assert len(one_more) == len(held) or len(one_more) > limit_batches or size_bytes > limit_bytes
    assert ring.since(first) == [each for each in ring.since(0) if each[0] >= first]


def test_a_ring_forgets_the_oldest_over_its_bytes() -> None:
    ring = ReplayBuffer(limit_batches=100, limit_bytes=10)
    for sequence in range(5):
        ring.append(sequence, b"1234")
        ring.validate()
    assert [sequence for sequence, _ in ring.since(0)] == [3, 4]
    ring.append(5, b"more than ten bytes")
    ring.validate()
    assert [sequence for sequence, _ in ring.since(0)] == [5]


def test_a_sequence_that_does_not_grow_empties_the_ring() -> None:
    ring = ReplayBuffer(limit_batches=100)
    for sequence in (0, 1, 2, 0):
        ring.append(sequence, b"")
        ring.validate()
    assert ring.since(0) == [(0, b"")]


def test_a_replay_has_what_is_wanted_of_the_source_s_last_start() -> None:
    replayed = ReplayedBatches(first=2)
    for sequence, payload in ((7, b"old"), (8, b"old"), (0, b"new"), (2, b"new"), (4, b"new")):
        replayed.append(sequence, payload)
    assert replayed.batches == [(2, b"new"), (4, b"new")]


def test_a_replay_over_its_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "REPLAY_LIMIT_BATCHES", 2)
    monkeypatch.setattr(replay_buffer, "REPLAY_LIMIT_BYTES", 10)
    replayed = ReplayedBatches(first=0)
    replayed.append(0, b"12345")
    replayed.append(1, b"12345")
    with pytest.raises(ProtocolError, match="more than 3 batches"):
        replayed.append(2, b"")
    with pytest.raises(ProtocolError, match="more than 1 batches"):
        ReplayedBatches(first=0).append(0, bytes(11))
