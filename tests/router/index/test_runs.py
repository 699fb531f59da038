"""Runs alone; `test_index.py` covers every cut and join."""

from __future__ import annotations

import gc
import sys

from services.router.index.runs import RUN_BLOCKS, Run, Runs, match_end, matching_piece, matching_piece_either_way

ALONE = (1, 0, 0)


def filled(blocks: int) -> tuple[Runs, Run]:
    """Return runs with the chain of blocks 1, 2, 3 …, and its last run."""
    runs = Runs()
    hashes = list(range(1, blocks + 1))
    last: Run | None = None
    at = 0
    while at < blocks:
        last, count = runs.add(hashes, at, ALONE, last)
        at += count
    assert last is not None
    return runs, last


def test_a_run_is_no_longer_than_the_limit_and_the_next_run_continues_it() -> None:
    runs, last = filled(RUN_BLOCKS + 1)
    runs.validate()
    assert [run.size for run in runs.coldest_first()] == [RUN_BLOCKS, 1]
    assert runs.find(RUN_BLOCKS) is not last
    assert runs.ending_with(RUN_BLOCKS + 1) is last
    assert runs.ending_with(5) is None


def test_blocks_added_one_by_one_from_the_end_join_the_run_after_them() -> None:
    runs, run = filled(10)
    others = runs.holders_of((3, 0, 0))
    for stop in range(10, 4, -1):
        runs.set_holders(run, stop - 1, stop, others)
        runs.validate()
    assert [list(each.hashes) for each in runs.coldest_first()] == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    assert runs.holder_sets == 2


def test_a_block_cut_from_the_middle_leaves_two_runs() -> None:
    runs, run = filled(10)
    runs.remove(run, 3, 4)
    runs.validate()
    assert sorted(list(each.hashes) for each in runs.coldest_first()) == [[1, 2, 3], [5, 6, 7, 8, 9, 10]]
    assert runs.find(4) is None


def test_the_warmest_run_is_dropped_last() -> None:
    runs = Runs()
    first, second = (runs.add([block], 0, ALONE, None)[0] for block in (1, 2))
    assert runs.coldest() is first
    runs.touch(first)
    assert runs.coldest() is second
    for _ in range(2):
        coldest = runs.coldest()
        assert coldest is not None
        runs.remove(coldest, 0, coldest.size)
    assert runs.coldest() is None
    assert runs.holder_sets == runs.blocks == runs.runs == 0


def test_matching_pieces_end_where_a_chain_and_a_run_differ() -> None:
    run = filled(8)[1]
    for shared in range(1, 9):
        assert match_end(run.hashes, [*range(1, shared + 1), -1, -2], 0) == shared
    assert match_end(run.hashes, [1, 2, 3], 0) == 3
    assert matching_piece(run, [0, 3, 4, 9], 1) == (2, 2)
    assert matching_piece(run, [7, 8], 0) == (6, 2)
    assert matching_piece_either_way(run, [8, 7, 6, 1], 0) == (5, 3)
    assert matching_piece_either_way(run, [5, 4, 9], 0) == (3, 2)
    assert matching_piece_either_way(run, [4, 5, 9], 0) == (3, 2)


def test_the_garbage_collector_tracks_no_run_and_none_is_leaked() -> None:
    runs, run = filled(3)
    gc.collect()
    assert not gc.is_tracked(run)
    assert not gc.is_tracked(run.hashes)
    key = sys.maxsize + 1  # no small int, of which CPython keeps one
    before = sys.getrefcount(key)
    runs.add([key], 0, run.holders.masks, None)
    assert sys.getrefcount(key) > before
    del run, runs
    assert sys.getrefcount(key) == before
