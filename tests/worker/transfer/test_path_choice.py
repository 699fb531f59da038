from __future__ import annotations

from services.worker.transfer.path_choice import Measured, PathChoice


def rows(blocks: int, **took_s: float) -> list[Measured]:
    return [Measured(path, loads, blocks, s) for path, s in took_s.items() for loads in (False, True)]


def test_the_fastest_copy_is_taken_for_groups_of_about_its_size() -> None:
    choice = PathChoice([*rows(1, rows=1.0, staged=2.0), *rows(8, rows=9.0, staged=4.0)])
    assert [choice.path(blocks, loads=True) for blocks in (1, 7, 8, 1000)] == ["rows", "rows", "staged", "staged"]


def test_a_kernel_that_touches_host_memory_must_be_twice_as_fast() -> None:
    assert PathChoice(rows(1, rows=1.0, zero_copy=0.6)).path(1, loads=False) == "rows"
    assert PathChoice(rows(1, rows=1.0, zero_copy=0.4)).path(1, loads=False) == "zero_copy"


def test_directions_are_chosen_apart_and_groups_smaller_than_any_measured_go_as_the_smallest() -> None:
    measured = [
        Measured("rows", True, 4, 1.0),
        Measured("batch", True, 4, 2.0),
        Measured("rows", False, 4, 2.0),
        Measured("batch", False, 4, 1.0),
    ]
    choice = PathChoice(measured)
    assert choice.path(1, loads=True) == "rows"
    assert choice.path(1, loads=False) == "batch"
