from __future__ import annotations

from services.worker.contracts.mover import Copied, Copy
from services.worker.transfer.batch import CopyBatch, GroupResult

COPIES = [Copy(slot, slot) for slot in range(5)]


def test_groups_are_handed_out_in_order_and_the_last_is_marked() -> None:
    batch = CopyBatch(1, COPIES, loads=True)
    assert batch.next_group(2, 1.0) == (COPIES[:2], False)
    assert batch.next_group(2, 2.0) == (COPIES[2:4], False)
    batch.add_result(GroupResult([True, True]), 2.0)
    assert batch.next_group(2, 3.5) == (COPIES[4:], True)
    batch.add_result(GroupResult([True, False]), 1.0)
    batch.add_result(GroupResult([True]), 1.0)
    batch.validate()
    assert batch.outcome(10) == Copied(1, [True, True, True, False, True], 50, 4.0)


def test_no_group_is_handed_out_after_the_deadline() -> None:
    batch = CopyBatch(1, COPIES, loads=False, until_s=2.0)
    batch.next_group(1, 1.9)
    assert batch.next_group(1, 2.0) == ((), True)
    batch.add_result(GroupResult([True]), 3.0)
    batch.validate()
    assert batch.outcome(10).good == [True, False, False, False, False]


def test_a_cancelled_batch_ends_with_the_groups_that_were_handed_out() -> None:
    batch = CopyBatch(1, COPIES, loads=True)
    batch.cancelled = True
    assert batch.next_group(1, 5.0) == ((), True)
    assert batch.outcome(10) == Copied(1, [False] * 5, 0, 0.0)


def test_no_copy_of_a_failed_batch_is_good() -> None:
    batch = CopyBatch(1, COPIES, loads=True)
    batch.next_group(2, 0.0)
    batch.add_result(GroupResult([True, True]), 1.0)
    batch.failed = "no"
    assert batch.next_group(2, 2.0) == ((), True)
    assert batch.outcome(10) == Copied(1, [False] * 5, 20, 1.0, "no")


def test_damaged_loads_are_named_by_their_index_in_the_batch_and_checksums_are_in_order() -> None:
    batch = CopyBatch(1, COPIES, loads=True)
    batch.next_group(3, 0.0)
    batch.next_group(2, 0.0)
    batch.add_result(GroupResult([True, False, True], damaged=[1], checksums=[1, 2, 3]), 1.0)
    batch.add_result(GroupResult([False, True], damaged=[0], checksums=[4, 5]), 2.0)
    batch.validate()
    told = batch.outcome(10)
    assert (told.damaged, told.checksums) == ([1, 3], [1, 2, 3, 4, 5])


def test_paths_and_differing_blocks_add_up_over_groups() -> None:
    batch = CopyBatch(1, COPIES, loads=True)
    batch.next_group(3, 0.0)
    batch.next_group(2, 0.0)
    batch.add_result(GroupResult([True, False, True], {"rows": 2, "batch": 1}, {"batch: no": 2}, 1), 1.0)
    batch.validate()
    batch.add_result(GroupResult([True, True], {"rows": 2}, {"batch: no": 1, "staged: no": 1}), 2.0)
    batch.validate()
    told = batch.outcome(10)
    assert (told.paths, told.fallbacks, told.differing) == (
        {"rows": 4, "batch": 1}, {"batch: no": 3, "staged: no": 1}, 1,
    )  # fmt: skip
