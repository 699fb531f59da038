from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.contracts.messages import Exchanged
from services.worker.contracts.mover import Copied
from services.worker.kv_connector.stats import MOST_NAMES, OTHER, TransferStats, add_counts

COUNTS = st.dictionaries(st.integers(0, 60).map(str), st.integers(1, 9), max_size=20)


def test_batches_of_either_direction_are_summed_up() -> None:
    stats = TransferStats()
    assert stats.new_totals() is None
    saved = Copied(1, [True, True, False], 20, 0.5, paths={"rows": 1, "batch": 1}, fallbacks={"staged: no": 1})
    loaded = Copied(2, [True, False, False], 30, 0.25, paths={"rows": 3}, fallbacks={"staged: no": 2}, differing=1)
    for _ in range(2):
        stats.count_saved(saved)
        stats.count_committed(2)
        stats.count_loaded(loaded)
    assert stats.changed
    assert stats.new_totals() == Exchanged(
        saved_blocks=4,
        loaded_blocks=2,
        bad_blocks=6,
        saved_bytes=40,
        loaded_bytes=60,
        save_s=1.0,
        load_s=0.5,
        saved_by={"rows": 2, "batch": 2},
        loaded_by={"rows": 6},
        fallbacks={"staged: no": 6},
        differing_blocks=2,
    )
    assert not stats.changed
    assert stats.new_totals() is None


def test_what_changes_nothing_is_no_news() -> None:
    stats = TransferStats()
    stats.count_committed(0)
    assert not stats.changed


@given(st.lists(COUNTS, max_size=8))
def test_however_many_names_there_are_all_is_counted_and_few_are_kept(batches: list[dict[str, int]]) -> None:
    sums: dict[str, int] = {}
    for counts in batches:
        before, sums = sums, add_counts(sums, counts)
        assert all(sums[name] >= count for name, count in before.items())
        assert len(sums.keys() - {OTHER}) <= MOST_NAMES
    assert sum(sums.values()) == sum(sum(counts.values()) for counts in batches)


def test_names_beyond_the_bound_are_others() -> None:
    sums = add_counts({str(name): 1 for name in range(MOST_NAMES)}, {"new": 2, "newer": 3, "0": 1})
    assert (sums[OTHER], sums["0"], len(sums)) == (5, 2, MOST_NAMES + 1)
