"""Reservations: events in any order and more than once; reservations are gone when attempts end."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.config import LoadConfig
from services.router.selection.load import (
    IDLE,
    REMEMBERED_LIMIT,
    SPEED_S,
    UNKNOWN_SPEED,
    AttemptId,
    CandidateLoad,
    LoadTracker,
    WorkerSpeed,
)
from shared.messages.load import LoadReport, RankLoad
from shared.messages.select import Reserved

A, B = ("a", 0), ("b", 0)


def reservation(
    request: str,
    instance: str = "a",
    *,
    tokens: int = 100,
    blocks: int = 10,
    frontend: str = "f",
    priority: int = 0,
    unreported: bool = False,
) -> Reserved:
    fields = {"priority": priority, "unreported": unreported, "lasts_s": 600.0 if unreported else 0.0}
    return Reserved(request, 1, frontend, instance, 0, tokens, blocks, **fields)  # type: ignore[arg-type]


def report(
    instance: str = "a",
    *requests: str,
    tokens: int = 0,
    blocks: int = 0,
    waiting: int = 0,
    running: int | None = None,
    progress: int = 1,
    speed: WorkerSpeed = UNKNOWN_SPEED,
) -> LoadReport:
    return LoadReport(
        instance=instance,
        epoch=1,
        progress=progress,
        waiting=waiting,
        running=len(requests) if running is None else running,
        waiting_tokens=tokens,
        total_blocks=1000,
        held_blocks=blocks,
        cached_blocks=0,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        step_s=speed.step_s,
        attempts=[(request, 1) for request in requests],
    )


def test_a_reservation_is_prefill_then_decode_then_nothing() -> None:
    load = LoadTracker(LoadConfig())
    assert load.add_reservation(reservation("r"), 0.0)
    assert load.load_of(A) == CandidateLoad(1, 100, 10)
    assert load.mark_prefilled(("r", 1)) is not None
    assert load.load_of(A) == CandidateLoad(1, 0, 10)
    load.mark_finished(("r", 1))
    assert load.load_of(A) == IDLE
    load.validate()


def test_what_a_worker_hears_of_later_is_kept_until_then_and_given_up_after_it() -> None:
    config = LoadConfig(grace_s=2.0, unknown_s=3.0)
    load = LoadTracker(config)
    load.add_reservation(msgspec.structs.replace(reservation("later"), delay_s=20.0), 0.0)
    load.add_reservation(reservation("now"), 0.0)
    for now_s, kept in ((4.9, ["later", "now"]), (5.0, ["later"]), (20.0, ["later"]), (24.9, ["later"]), (25.0, [])):
        load.apply_report(report(), now_s)
        assert [one.reserved.request for one in load.reservations()] == kept, now_s
        load.validate()
    assert load.statistics().forgotten == 2


def test_once_a_worker_has_heard_of_it_a_delay_that_is_over_keeps_nothing() -> None:
    load = LoadTracker(LoadConfig(grace_s=2.0, unknown_s=3.0))
    load.add_reservation(msgspec.structs.replace(reservation("r"), delay_s=20.0), 0.0)
    load.apply_report(report("a", "r"), 30.0)
    load.apply_report(report(), 32.9)
    assert load.candidate_of(("r", 1)) == A
    load.apply_report(report(), 33.0)
    assert load.candidate_of(("r", 1)) is None


def test_an_attempt_that_a_gateway_sends_outlives_reports_without_it_until_its_end() -> None:
    load = LoadTracker(LoadConfig(grace_s=2.0, unknown_s=3.0))
    load.add_reservation(reservation("r", unreported=True), 0.0)
    load.apply_report(report(running=1, blocks=11), 1.9)
    assert load.load_of(A) == CandidateLoad(2, 100, 21), "the server may not have been looked at since"
    load.apply_report(report(running=1, blocks=11), 2.0)
    assert load.load_of(A) == CandidateLoad(1, 100, 11), "the server's own counts have it, but for its tokens"
    load.apply_report(report(running=1, blocks=11), 601.9)
    load.mark_prefilled(("r", 1))
    assert load.load_of(A) == CandidateLoad(1, 0, 11)
    load.mark_finished(("r", 1))
    assert load.load_of(A) == CandidateLoad(0, 0, 1), "its blocks go at once, and not only with the next report"
    assert load.statistics().forgotten == 0
    load.validate()


def test_an_attempt_that_a_gateway_sends_is_given_up_after_its_time_if_its_end_was_lost() -> None:
    load = LoadTracker(LoadConfig(grace_s=2.0, unknown_s=3.0))
    load.add_reservation(reservation("r", unreported=True), 0.0)
    load.apply_report(report(), 601.9)
    assert load.load_of(A).queued_tokens == 100
    load.apply_report(report(), 602.0)
    assert load.load_of(A) == IDLE
    assert load.statistics().forgotten == 1
    load.validate()


def test_an_attempt_that_a_gateway_sends_ends_with_its_worker_and_with_its_frontend() -> None:
    for end in ("worker", "frontend"):
        load = LoadTracker(LoadConfig(grace_s=0.0))
        load.add_reservation(reservation("r", unreported=True), 0.0)
        load.apply_report(report(), 1.0)
        if end == "worker":
            load.remove_instance("a")
        else:
            load.remove_frontend("f")
        assert load.load_of(A) == IDLE
        load.validate()


def test_a_delay_does_not_outlive_the_end_of_the_attempt_its_worker_or_its_frontend() -> None:
    for end in ("finished", "worker", "frontend"):
        load = LoadTracker(LoadConfig())
        load.add_reservation(msgspec.structs.replace(reservation("r"), delay_s=20.0), 0.0)
        if end == "finished":
            load.mark_finished(("r", 1))
        elif end == "worker":
            load.remove_instance("a")
        else:
            load.remove_frontend("f")
        assert load.load_of(A) == IDLE
        load.validate()


def test_a_withdrawn_attempt_may_be_reserved_again() -> None:
    load = LoadTracker(LoadConfig())
    load.add_reservation(reservation("r"), 0.0)
    load.withdraw(("r", 1))
    assert (load.load_of(A), load.candidate_of(("r", 1))) == (IDLE, None)
    load.withdraw(("r", 1))
    assert load.add_reservation(reservation("r", "b"), 1.0)
    assert (load.load_of(A), load.load_of(B).requests, load.candidate_of(("r", 1))) == (IDLE, 1, B)
    load.validate()


def test_every_event_may_come_twice() -> None:
    load = LoadTracker(LoadConfig())
    assert load.add_reservation(reservation("r"), 0.0)
    assert not load.add_reservation(reservation("r"), 0.0)
    load.mark_prefilled(("r", 1))
    assert load.mark_prefilled(("r", 1)) is None
    load.mark_finished(("r", 1))
    load.mark_finished(("r", 1))
    assert not load.add_reservation(reservation("r"), 1.0)
    assert load.load_of(A) == IDLE


def test_an_end_that_comes_before_its_reservation_is_remembered() -> None:
    load = LoadTracker(LoadConfig())
    load.mark_prefilled(("p", 1))
    load.mark_finished(("e", 1))
    assert load.add_reservation(reservation("p"), 0.0)
    assert load.load_of(A) == CandidateLoad(1, 0, 10)
    assert not load.add_reservation(reservation("e"), 0.0)
    load.validate()


def test_a_router_grows_by_few_megabytes_however_many_attempts_end() -> None:
    load = LoadTracker(LoadConfig())
    for number in range(REMEMBERED_LIMIT + 100):
        load.mark_finished((f"{number}", 1))
    assert load.statistics().remembered == REMEMBERED_LIMIT == 16_384


def test_remembered_attempts_are_bounded() -> None:
    load = LoadTracker(LoadConfig(), remembered_limit=2)
    for request in "abc":
        load.mark_finished((request, 1))
    assert load.statistics().remembered == 2
    assert load.add_reservation(reservation("a"), 0.0), "the oldest is forgotten"
    load.validate()


def test_at_the_limit_the_oldest_reservation_is_released() -> None:
    load = LoadTracker(LoadConfig(limit=2))
    for request in "abc":
        load.add_reservation(reservation(request), 0.0)
    assert load.statistics().reservations == 2
    assert load.statistics().forgotten == 1
    load.mark_finished(("b", 1))
    load.mark_finished(("c", 1))
    assert load.load_of(A) == IDLE


def test_a_report_replaces_the_reservations_that_it_has_and_keeps_the_others() -> None:
    load = LoadTracker(LoadConfig())
    load.add_reservation(reservation("old"), 0.0)
    load.add_reservation(reservation("new", tokens=7, blocks=1), 0.0)
    load.apply_report(report("a", "old", tokens=40, blocks=12), 1.0)
    assert load.load_of(A) == CandidateLoad(2, 40 + 7, 12 + 1)
    load.mark_prefilled(("old", 1))
    assert load.load_of(A) == CandidateLoad(2, 7, 13)
    load.mark_finished(("old", 1))
    assert load.load_of(A) == CandidateLoad(1, 7, 3)
    load.validate()


def test_no_token_waits_once_all_that_the_report_lets_wait_have_had_their_first() -> None:
    load = LoadTracker(LoadConfig())
    for name in ("r", "s"):  # their blocks were to come from elsewhere, but the worker has to compute them
        load.add_reservation(reservation(name, tokens=2), 0.0)
    load.apply_report(report("a", "r", "s", tokens=500, waiting=2, running=0), 1.0)
    load.mark_prefilled(("r", 1))
    assert load.load_of(A).queued_tokens == 498
    load.mark_prefilled(("s", 1))
    assert load.load_of(A).queued_tokens == 0
    load.validate()


@pytest.mark.parametrize(("waiting", "running"), [(2, 0), (1, 2)])
def test_tokens_of_a_preempted_attempt_and_of_strangers_wait_on_when_ours_are_computed(
    waiting: int, running: int
) -> None:
    load = LoadTracker(LoadConfig())
    load.add_reservation(reservation("r", tokens=2), 0.0)
    load.add_reservation(reservation("s", tokens=2), 0.0)
    load.mark_prefilled(("s", 1))
    load.apply_report(report("a", "r", "s", tokens=500, waiting=waiting, running=running), 1.0)
    load.mark_prefilled(("r", 1))
    assert load.load_of(A).queued_tokens == 498
    load.validate()


def test_load_without_a_reservation_here_counts() -> None:
    load = LoadTracker(LoadConfig())
    load.apply_report(report("a", "stranger", tokens=50, blocks=5), 0.0)
    assert load.load_of(A) == CandidateLoad(1, 50, 5)
    load.apply_report(report("a"), 0.25)
    assert load.load_of(A) == IDLE


def test_only_the_attempts_are_used_from_a_report_of_several_ranks() -> None:
    load = LoadTracker(LoadConfig(grace_s=3, unknown_s=10))
    load.add_reservation(Reserved("r", 1, "f", "a", 1, 100, 10), 0.0)
    load.apply_report(report("a", "r", tokens=900, blocks=90), 1.0, ranks=2)
    assert load.load_of(A) == IDLE
    assert load.load_of(("a", 1)) == CandidateLoad(1, 100, 10)
    load.apply_report(report("a"), 20.0, ranks=2)
    assert load.load_of(("a", 1)) == IDLE
    load.validate()


def test_a_report_of_each_rank_counts_for_that_rank() -> None:
    load = LoadTracker(LoadConfig(grace_s=3, unknown_s=10))
    load.add_reservation(Reserved("r", 1, "f", "a", 1, 100, 10), 0.0)
    load.add_reservation(Reserved("new", 1, "f", "a", 0, 7, 1), 0.0)
    ranks = [RankLoad(0, 1, 1, 50, 5), RankLoad(1, 0, 1, 40, 12), RankLoad(2, 9, 9, 9, 9)]
    summed = report("a", "r", tokens=90, blocks=17)
    load.apply_report(msgspec.structs.replace(summed, ranks=ranks), 1.0, ranks=2)
    assert load.load_of(A) == CandidateLoad(3, 50 + 7, 5 + 1)
    assert load.load_of(("a", 1)) == CandidateLoad(1, 40, 12)
    assert load.load_of(("a", 2)) == IDLE, "the card has two ranks"
    load.validate()
    load.mark_finished(("r", 1))
    assert load.load_of(("a", 1)) == CandidateLoad(0, 0, 2)
    idle = [RankLoad(0, 0, 0, 0, 0), RankLoad(1, 0, 0, 0, 0)]
    load.apply_report(msgspec.structs.replace(report("a"), ranks=idle), 20.0, ranks=2)
    assert (load.load_of(A), load.load_of(("a", 1))) == (IDLE, IDLE)
    load.validate()


def test_a_reservation_that_reports_lack_for_long_is_released() -> None:
    load = LoadTracker(LoadConfig(grace_s=3, unknown_s=10))
    load.add_reservation(reservation("r"), 0.0)
    for now_s in range(13):
        load.apply_report(report("a"), float(now_s))
        assert load.statistics().reservations == 1
    load.apply_report(report("a"), 13.0)
    assert load.load_of(A) == IDLE
    assert load.statistics().forgotten == 1
    load.validate()


def test_neither_time_alone_nor_reports_that_have_it_release_a_reservation() -> None:
    load = LoadTracker(LoadConfig(grace_s=3, unknown_s=10))
    load.add_reservation(reservation("r"), 0.0)
    load.apply_report(report("a", "r"), 100.0)
    load.apply_report(report("a"), 109.0)
    load.apply_report(report("a", "r"), 1000.0)
    assert load.statistics().reservations == 1


def test_a_lease_that_ends_releases_its_reservations() -> None:
    load = LoadTracker(LoadConfig())
    load.add_reservation(reservation("1", "a", frontend="f"), 0.0)
    load.add_reservation(reservation("2", "a", frontend="g"), 0.0)
    load.add_reservation(reservation("3", "b", frontend="g"), 0.0)
    load.apply_report(report("b", tokens=9), 0.0)
    assert load.remove_frontend("f") == [("1", 1)]
    assert load.remove_instance("b") == [("3", 1)]
    assert load.load_of(B) == IDLE
    assert load.load_of(A).requests == 1
    load.validate()


def test_blocks_of_a_server_that_counts_none_stay_reserved() -> None:
    load = LoadTracker(LoadConfig(grace_s=3, unknown_s=10))
    load.add_reservation(reservation("r", unreported=True), 0.0)
    before = load.load_of(A).active_blocks
    load.mark_prefilled(("r", 1))
    for now_s in (1.0, 4.0, 60.0):
        load.apply_report(report("a"), now_s)  # nothing runs there, it says
        assert load.load_of(A).active_blocks == before > 0


def test_tokens_of_a_lower_priority_are_not_ahead() -> None:
    load = LoadTracker(LoadConfig())
    for request, tokens, priority in (("low", 1000, -1), ("usual", 100, 0), ("high", 10, 5)):
        load.add_reservation(reservation(request, tokens=tokens, priority=priority), 0.0)
    assert [load.load_of(A, priority).queued_tokens for priority in (-1, 0, 5, 6)] == [1110, 110, 10, 0]
    assert load.load_of(A, 5).requests == 3
    load.apply_report(report("a", "low", "usual", "high", tokens=900), 1.0)
    assert [load.load_of(A, priority).queued_tokens for priority in (-1, 0)] == [900, 0]
    load.mark_prefilled(("low", 1))
    assert load.load_of(A, 0).queued_tokens == load.load_of(A, -1).queued_tokens == 0
    load.validate()


def test_a_workers_speed_is_the_one_it_reported_last() -> None:
    load = LoadTracker(LoadConfig())
    assert load.speeds == {}
    load.apply_report(report(speed=WorkerSpeed(1000.0, 0.02)), 0.0)
    assert load.speeds["a"] == WorkerSpeed(1000.0, 0.02)
    for never in (float("nan"), float("inf"), -1.0, 1e300, 5e-324):
        load.apply_report(report(speed=WorkerSpeed(never, never)), 1.0)
        assert load.speeds["a"] == UNKNOWN_SPEED
    load.remove_instance("a")
    assert load.speeds == {}
    load.validate()


def test_a_prefill_speed_is_old_once_it_has_not_fallen_for_a_while() -> None:
    load = LoadTracker(LoadConfig())

    def is_old(tokens_per_s: float, step_s: float, now_s: float) -> bool:
        load.apply_report(report(speed=WorkerSpeed(tokens_per_s, step_s)), now_s)
        return load.speeds["a"].old

    assert not is_old(0.0, 0.02, 4.0), "it is unknown"
    assert not is_old(1000.0, 0.02, 5.0)
    assert not is_old(1001.0, 0.02, 5.0 + SPEED_S - 0.1)
    assert is_old(1002.0, 0.03, 5.0 + SPEED_S), "only a fall shows that it is low"
    assert is_old(1003.0, 0.03, 6.0 + SPEED_S), "short prompts raise it a little"
    assert not is_old(1002.0, 0.03, 7.0 + SPEED_S)
    assert not is_old(1002.0, 0.03, 6.0 + 2 * SPEED_S)
    assert is_old(1002.0, 0.03, 7.0 + 2 * SPEED_S)
    load.remove_instance("a")
    assert not is_old(1002.0, 0.03, 8.0 + 2 * SPEED_S), "another worker under the name"


def frozen(load: LoadTracker, now_s: float, *reports: LoadReport) -> set[str]:
    """The instances that are frozen at `now_s` if these reports come every quarter of a second until then."""
    at_s = 0.0
    while at_s < now_s:
        for each in reports:
            load.apply_report(each, at_s)
        load.frozen_instances(at_s)
        at_s += 0.25
    return set(load.frozen_instances(now_s))


def test_a_worker_with_work_and_without_a_step_is_frozen_until_it_makes_one() -> None:
    load = LoadTracker(LoadConfig(frozen_s=5))
    assert frozen(load, 4.9, report("a", "r"), report("b")) == set()
    assert frozen(load, 10.0, report("a", "r"), report("b")) == {"a"}
    load.apply_report(report("a", "r", progress=2), 10.25)
    assert load.frozen_instances(10.25) == set()


def test_a_worker_whose_engine_stopped_while_it_was_idle_is_frozen_once_it_has_an_attempt() -> None:
    load = LoadTracker(LoadConfig(frozen_s=5))
    assert frozen(load, 10.0, report("a", "r", running=0), report("b", running=0)) == {"a"}


def test_the_time_of_an_idle_worker_counts_from_when_work_came() -> None:
    load = LoadTracker(LoadConfig(frozen_s=5))
    assert frozen(load, 20.0, report("a")) == set()
    load.apply_report(report("a", "r"), 20.0)
    assert load.frozen_instances(20.1) == set()


def test_a_worker_whose_reports_stop_is_frozen_though_it_was_idle() -> None:
    load = LoadTracker(LoadConfig(frozen_s=5))
    load.apply_report(report("a"), 0.0)
    load.apply_report(report("b"), 0.0)
    assert frozen(load, 5.0, report("b")) == {"a"}


def test_while_the_router_is_cut_off_and_right_after_no_worker_is_frozen() -> None:
    load = LoadTracker(LoadConfig(frozen_s=5))
    load.apply_report(report("a", "r"), 0.0)
    for second in range(60):
        assert load.frozen_instances(float(second), listening=second < 3) == set()
    assert load.frozen_instances(60.0) == set()
    assert [load.frozen_instances(59.0 + quarter / 4) for quarter in (8, 16, 20)] == [set(), set(), {"a"}]


def test_a_router_that_was_frozen_itself_takes_no_worker_for_frozen() -> None:
    load = LoadTracker(LoadConfig(frozen_s=5))
    load.apply_report(report("a", "r"), 0.0)
    load.frozen_instances(0.0)
    assert load.frozen_instances(100.0) == set()
    assert load.frozen_instances(101.0) == set()


class LoadMachine(RuleBasedStateMachine):
    """Few requests on few instances, with events in any order; every request ends at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.load = LoadTracker(LoadConfig(limit=6, grace_s=3, unknown_s=10), remembered_limit=8)
        self.now_s = 0.0

    @rule(
        request=st.sampled_from("pqrstuvw"),
        instance=st.sampled_from("ab"),
        frontend=st.sampled_from("fg"),
        priority=st.integers(-2, 2),
        unreported=st.booleans(),
    )
    def reserve(self, request: str, instance: str, frontend: str, priority: int, unreported: bool) -> None:
        reserved = reservation(request, instance, frontend=frontend, priority=priority, unreported=unreported)
        self.load.add_reservation(reserved, self.now_s)

    @rule(request=st.sampled_from("pqrstuvw"))
    def prefill(self, request: str) -> None:
        self.load.mark_prefilled((request, 1))

    @rule(request=st.sampled_from("pqrstuvw"))
    def finish(self, request: str) -> None:
        self.load.mark_finished((request, 1))

    @rule(request=st.sampled_from("pqrstuvw"))
    def withdraw(self, request: str) -> None:
        self.load.withdraw((request, 1))
        assert self.load.candidate_of((request, 1)) is None

    @rule(
        instance=st.sampled_from("ab"),
        requests=st.sets(st.sampled_from("pqrstuvw")),
        tokens=st.integers(0, 300),
        later_s=st.floats(0, 6),
    )
    def hear(self, instance: str, requests: set[str], tokens: int, later_s: float) -> None:
        self.now_s += later_s
        self.load.apply_report(report(instance, *requests, tokens=tokens, blocks=tokens // 10), self.now_s)

    @rule(frontend=st.sampled_from("fg"))
    def lose_frontend(self, frontend: str) -> None:
        self.load.remove_frontend(frontend)

    @rule(instance=st.sampled_from("ab"))
    def lose_instance(self, instance: str) -> None:
        self.load.remove_instance(instance)

    @invariant()
    def valid(self) -> None:
        self.load.validate()
        for candidate in (A, B):
            ahead = [self.load.load_of(candidate, priority).queued_tokens for priority in (-1, 0, 1)]
            assert ahead == sorted(ahead, reverse=True)
            assert ahead[-1] >= 0

    def teardown(self) -> None:
        ended: list[AttemptId] = [(request, 1) for request in "pqrstuvw"]
        for attempt in ended:
            self.load.mark_finished(attempt)
        for instance in "ab":
            self.load.apply_report(report(instance), self.now_s)
        assert self.load.load_of(A) == self.load.load_of(B) == IDLE
        assert self.load.statistics().reservations == 0


TestLoad = LoadMachine.TestCase
TestLoad.settings = settings(max_examples=80, stateful_step_count=30)
