"""Which fleets a plan tries, and whether it finds the best one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.size.search import GIVEN_UP, FleetCandidate, FleetSearch, FleetSetting, Targets, settings_of
from shared.messages.virtual import Percentiles, VirtualResult

TARGETS = Targets({"ttft_p90": 0.5, "itl_p99": 0.05})
Outcome = Callable[[FleetCandidate], VirtualResult]


def result(ttft_s: float, itl_s: float = 0.01, *, failed: int = 0, given_up: bool = False) -> VirtualResult:
    return VirtualResult(
        ttft_s=Percentiles(ttft_s, ttft_s, ttft_s),
        itl_s=Percentiles(itl_s, itl_s, itl_s),
        requests_per_s=1.0,
        output_tokens_per_s=100.0,
        hit_rate=0.0,
        failed=failed,
        given_up=given_up,
    )


def searched(outcome: Outcome, settings: list[FleetSetting], *, most: int = 16, width: int = 2) -> FleetSearch:
    search = FleetSearch(settings, most, TARGETS, width=width)
    while wanted := search.next():
        assert not any(each in search.results for each in wanted)
        for candidate in wanted:
            search.add(candidate, outcome(candidate))
    return search


def best_of(search: FleetSearch) -> tuple[FleetCandidate, float]:
    """The smallest fleet that meets the targets, or else the nearest, and its worst ratio."""
    ratios = {each: TARGETS.worst(result) for each, result in search.results.items()}
    best = min(ratios, key=lambda each: (ratios[each] > 1, each.workers if ratios[each] <= 1 else 0, ratios[each]))
    return best, ratios[best]


def fleets(settings: list[FleetSetting], most: int) -> list[FleetCandidate]:
    """All fleets there are."""
    return [
        FleetCandidate(workers, prefill, setting)
        for workers, setting in product(range(1, most + 1), settings)
        for prefill in (range(1, workers) if setting.split else (0,))
    ]


def plain(**changes: list[float]) -> list[FleetSetting]:
    return settings_of(
        splits=bool(changes.get("splits")),
        policies=["kv"],
        max_running=[int(each) for each in changes.get("max_running", [64])],
        step_s=changes.get("step_s", [0.25]),
        store_tokens=[int(each) for each in changes.get("store_tokens", [0])],
    )


@pytest.mark.parametrize("needed", range(1, 17))
def test_the_fewest_workers_that_meet_the_targets_are_found_in_a_few_runs(needed: int) -> None:
    search = searched(lambda each: result(0.5 * needed / each.workers), plain())
    assert best_of(search)[0].workers == needed
    assert len(search.results) <= 9


def test_a_setting_that_needs_fewer_workers_than_the_first_one_is_found() -> None:
    settings = plain(step_s=[0.25, 0.05], max_running=[64, 16])

    def outcome(each: FleetCandidate) -> VirtualResult:
        needed = 3 if (each.setting.step_s, each.setting.max_running) == (0.05, 16) else 6
        return result(0.5 * needed / each.workers)

    search = searched(outcome, settings)
    assert best_of(search)[0] == FleetCandidate(3, 0, FleetSetting(False, "kv", 16, 0.05, 0))
    assert len(search.results) < len(fleets(settings, 16)) / 2


def test_of_fleets_of_one_price_the_one_with_the_most_room_is_the_answer() -> None:
    settings = plain(max_running=[64, 32])
    search = searched(lambda each: result(0.4 * 2 / each.workers, each.setting.max_running / 1500), settings)
    assert best_of(search)[0] == FleetCandidate(2, 0, settings[1])
    assert TARGETS.worst(search.results[FleetCandidate(2, 0, settings[0])]) <= 1


def test_roles_are_tried_with_every_division_and_only_with_a_store() -> None:
    assert not any(setting.split for setting in plain(splits=[1.0]))
    settings = plain(splits=[1.0], store_tokens=[0, 5000])
    search = searched(
        lambda each: result(0.4 if each.prefill == 1 and each.workers == 3 else 2.0 / each.workers), settings
    )
    best, _ = best_of(search)
    assert (best.workers, best.prefill, best.setting.store_tokens) == (3, 1, 5000)


def test_targets_that_nothing_meets_have_the_nearest_fleet() -> None:
    search = searched(lambda each: result(10 / each.workers), plain(step_s=[0.25, 0.05]), most=5)
    assert best_of(search)[1] == pytest.approx(4.0)
    assert best_of(search)[0].workers == 5


def test_a_run_that_was_given_up_or_failed_meets_nothing() -> None:
    assert TARGETS.worst(result(0.1, given_up=True)) == GIVEN_UP
    assert TARGETS.worst(result(0.1, failed=1)) == GIVEN_UP
    assert TARGETS.misses(result(0.25, 0.1)) == {"ttft_p90": 0.5, "itl_p99": 2.0}


@given(st.integers(1, 4), st.lists(st.integers(1, 12), min_size=6, max_size=6), st.booleans())
def test_the_answer_is_that_of_trying_all_fleets(width: int, needs: list[int], splits: bool) -> None:
    settings = plain(splits=[1.0] * splits, step_s=[0.25, 0.05], store_tokens=[0, 9000])

    def outcome(each: FleetCandidate) -> VirtualResult:
        needed = needs[settings.index(each.setting)]
        helpful = min(each.prefill, each.workers - each.prefill) * 2 if each.prefill else each.workers
        return result(0.5 * needed / helpful)

    search = searched(outcome, settings, most=10, width=width)
    every = {each: outcome(each) for each in fleets(settings, 10)}
    good = [each for each, made in every.items() if TARGETS.worst(made) <= 1]
    best, worst = best_of(search)
    if good:
        least = min(each.workers for each in good)
        assert best.workers == least
        assert worst == min(TARGETS.worst(every[each]) for each in good if each.workers == least)
    else:
        assert worst > 1
