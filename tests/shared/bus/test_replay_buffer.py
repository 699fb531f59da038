"""The replay buffer and its limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.bus.replay_buffer import ReplayBuffer


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
