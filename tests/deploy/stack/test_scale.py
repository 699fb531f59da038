"""deploy/local/stack/scale.py: which workers come and go when an `up` is asked for another number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.local.stack.scale import changes, leaving_order


def test_workers_that_are_missing_get_free_names_and_places() -> None:
    there = {"worker-0": ("aggregated", 0), "worker-2": ("aggregated", 2)}
    added, removed = changes({"aggregated": 4}, there, list(there), 64)
    assert added == [("worker-1", "aggregated", 1), ("worker-3", "aggregated", 3)]
    assert removed == []


def test_the_first_of_those_that_stay_leave_first() -> None:
    there = {f"worker-{index}": ("aggregated", index) for index in range(3)}
    assert changes({"aggregated": 1}, there, ["worker-1", "worker-2", "worker-0"], 64)[1] == ["worker-1", "worker-2"]


def test_workers_that_do_not_serve_yet_leave_before_those_that_do() -> None:
    there = {f"worker-{index}": ("aggregated", index) for index in range(4)}
    pids = {f"worker-{index}": 100 + index for index in range(4)}
    assert leaving_order([*there], there, pids, [101, 100]) == ["worker-3", "worker-2", "worker-1", "worker-0"]
    assert leaving_order([*there], there, pids, [103, 100]) == ["worker-2", "worker-1", "worker-3", "worker-0"]


def test_a_worker_changes_its_role_by_leaving_and_the_new_one_waits_for_its_place() -> None:
    there = {"prefill-0": ("prefill", 0), "decode-0": ("decode", 1), "decode-1": ("decode", 2)}
    wanted = {"prefill": 2, "decode": 1}
    assert changes(wanted, there, list(there), 3) == ([], ["decode-0"])
    leaving = ["prefill-0", "decode-1"]
    assert changes(wanted, there, leaving, 3) == ([], []), "it has not ended yet"
    del there["decode-0"]
    assert changes(wanted, there, leaving, 3) == ([("prefill-1", "prefill", 1)], [])


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 5), st.integers(0, 5), st.integers(1, 10))
def test_no_place_is_given_twice_and_no_more_go_than_are_too_many(
    prefill: int, decode: int, prefills: int, decodes: int, places: int
) -> None:
    there = {f"prefill-{index}": ("prefill", index) for index in range(prefills)}
    there |= {f"decode-{index}": ("decode", prefills + index) for index in range(decodes)}
    added, removed = changes({"prefill": prefill, "decode": decode}, there, list(there), places)
    taken = [place for _, place in there.values()] + [place for _, _, place in added]
    assert len(taken) == len({*taken})
    assert not {name for name, _, _ in added} & {*there}
    assert len(removed) == max(0, prefills - prefill) + max(0, decodes - decode)
    assert len(there) + len(added) <= max(len(there), places)
