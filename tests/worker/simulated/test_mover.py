from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.contracts.mover import Copied, Copy
from services.worker.simulated.mover import SimulatedMover
from tests.worker.empty_pool import EmptyPool

COPY_S = 0.25
BLOCK_BYTES = 1000


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pool = EmptyPool()
        self.mover = SimulatedMover(BLOCK_BYTES, BLOCK_BYTES / COPY_S, lambda: self.now_s)
        self.mover.attach(self.pool)

    def at(self, now_s: float) -> list[Copied]:
        self.now_s = now_s
        told = self.mover.ended()
        self.mover.validate()
        return told


def copies(count: int) -> list[Copy]:
    return [Copy(slot, slot) for slot in range(count)]


def test_a_batch_ends_when_its_bytes_would_have_been_moved() -> None:
    rig = Rig()
    assert (rig.mover.fileno(), rig.mover.ends_s) == (-1, None)
    rig.mover.load(5, copies(4))
    assert rig.mover.ends_s == 1.0
    assert rig.at(0.99) == []
    assert rig.at(1.0) == [Copied(5, [True] * 4, 4 * BLOCK_BYTES, 1.0)]
    assert rig.mover.ends_s is None


def test_batches_of_a_direction_follow_one_another_and_directions_do_not_wait() -> None:
    rig = Rig()
    rig.mover.load(1, copies(2))
    rig.mover.load(2, copies(2))
    rig.mover.save(3, copies(3), 9.0)
    assert [copied.batch for copied in rig.at(0.5)] == [1]
    assert [copied.batch for copied in rig.at(0.75)] == [3]
    assert rig.mover.ends_s == 1.0
    assert [copied.batch for copied in rig.at(1.0)] == [2]


def test_a_link_that_was_idle_begins_at_once() -> None:
    rig = Rig()
    rig.at(7.0)
    rig.mover.save(1, copies(1), 9.0)
    assert rig.mover.ends_s == 7.25


def test_no_save_begins_at_or_after_its_end() -> None:
    rig = Rig()
    rig.mover.save(1, copies(4), 0.5)
    rig.mover.save(2, copies(1), 0.5)
    assert rig.at(0.5) == [
        Copied(1, [True, True, False, False], 2 * BLOCK_BYTES, 0.5),
        Copied(2, [False], 0, 0.0),
    ]


def test_a_cancelled_batch_ends_with_the_copy_under_way_and_what_waits_moves_up() -> None:
    rig = Rig()
    rig.mover.load(1, copies(4))
    rig.mover.load(2, copies(4))
    rig.mover.load(3, copies(1))
    rig.at(0.3)
    rig.mover.cancel(1)
    rig.mover.cancel(2)
    rig.mover.cancel(17)
    assert rig.mover.ends_s == 0.5
    assert rig.at(0.75) == [
        Copied(1, [True, True, False, False], 2 * BLOCK_BYTES, 0.5),
        Copied(2, [False] * 4, 0, 0.0),
        Copied(3, [True], BLOCK_BYTES, 0.25),
    ]


def test_a_load_from_a_slot_that_is_granted_meanwhile_is_not_good() -> None:
    rig = Rig()
    rig.mover.load(1, copies(3))
    rig.pool.generations[1] += 1
    assert rig.at(1.0)[0].good == [True, False, True]


def test_batches_under_way_when_it_is_closed_are_not_reported() -> None:
    rig = Rig()
    rig.mover.load(1, copies(1))
    rig.mover.close()
    assert rig.at(9.0) == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("load"), st.integers(0, 5)),
            st.tuples(st.just("save"), st.integers(0, 5)),
            st.tuples(st.just("cancel"), st.integers(0, 20)),
            st.tuples(st.just("wait"), st.integers(0, 5)),
        )
    )
)
def test_every_batch_ends_once_not_before_its_time_and_in_order(steps: list[tuple[str, int]]) -> None:
    rig = Rig()
    asked: dict[str, list[int]] = {"load": [], "save": []}
    told: list[Copied] = []
    for number, (what, count) in enumerate(steps):
        expected_s = rig.mover.ends_s
        match what:
            case "load":
                rig.mover.load(number, copies(count))
                asked["load"].append(number)
            case "save":
                rig.mover.save(number, copies(count), rig.now_s + 0.6)
                asked["save"].append(number)
            case "cancel":
                rig.mover.cancel(count)
            case _:
                ended = rig.at(rig.now_s + count / 10)
                assert bool(ended) == (expected_s is not None and expected_s <= rig.now_s)
                told.extend(ended)
    told.extend(rig.at(rig.now_s + 1000.0))
    for line in asked.values():
        assert [copied.batch for copied in told if copied.batch in line] == line
    assert len(told) == sum(map(len, asked.values()))
    for copied in told:
        assert copied.good == sorted(copied.good, reverse=True)
        assert copied.moved_bytes == BLOCK_BYTES * sum(copied.good)
    rig.mover.detach()
