from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.local.bench.plan import Point
from deploy.local.bench.rows import Result, RowKey, render, render_terms, render_turns, row_of
from deploy.local.bench.terms import Spread, Terms, spread

POINT = Point("closed", 4, 3)
DONE = Result(
    "done", first_s=0.1, last_s=0.5, ended_s=0.6, gaps_s=(0.2, 0.2), events=3, prompt_tokens=10, completion_tokens=5
)


def test_tokens_are_the_servers_count_and_latencies_those_of_requests_that_were_done() -> None:
    early = Result("ended early", "no finish reason", first_s=9.0, last_s=9.0, ended_s=9.0, events=2)
    row = row_of(POINT, [DONE, DONE, early], 2.0, 0.1)
    assert row.tokens_per_s == 6.0
    assert row.tokens_by == "usage"
    assert row.requests_per_s == 1.0
    assert (row.first_token_s.max, row.whole_s.max, row.inter_token_s.max) == (0.1, 0.6, 0.2)
    assert row.time_per_token_s.p50 == 0.1
    assert row.prompt_tokens == 10
    assert row.outcomes == {"done": 2, "ended early": 1}
    assert row.reasons == {"no finish reason": 1}
    assert row.complete


def test_where_the_server_does_not_count_an_event_is_a_token_and_the_table_says_so() -> None:
    row = row_of(POINT, [Result("done", first_s=0.1, last_s=0.3, ended_s=0.4, gaps_s=(0.2,), events=2)], 1.0, 0.9)
    assert (row.tokens_by, row.tokens_per_s, row.prompt_tokens) == ("events", 2.0, None)
    text = render([row])
    for note in ("each event counts as one token", "used 90% of a core", "not complete"):
        assert note in text


def test_a_load_of_which_nothing_came_back_has_a_row_too() -> None:
    row = row_of(POINT, [Result("refused", "429: busy")] * 3, 1.0, 0.0)
    assert row.first_token_s == Spread()
    head, line, note = render([row]).splitlines()
    assert head.split()[:3] == ["LOAD", "DONE", "FAILED"]
    assert line.split()[:5] == ["concurrency", "4", "0", "3", "-"]
    assert note == "concurrency 4: 3 refused (429: busy)"


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_percentiles_are_values_that_were_seen_in_order(seconds: list[float]) -> None:
    found = spread(seconds)
    assert found.p50 is not None
    assert found.p90 is not None
    assert found.p99 is not None
    assert found.p50 <= found.p90 <= found.p99 <= max(seconds) == found.max
    for percentile, share in ((found.p50, 0.5), (found.p90, 0.9), (found.p99, 0.99)):
        assert percentile in seconds
        assert sum(value <= percentile for value in seconds) >= share * len(seconds)


def test_turns_of_sessions_are_summed_up_in_groups_that_grow() -> None:
    results = [
        Result("done", first_s=1 / turn, events=1, prompt_tokens=100, cached_tokens=min(100, 2 * turn), turn=turn)
        for turn in range(1, 41)
    ]
    row = row_of(POINT, results, 1.0, 0.1, planned=40)
    assert [(each.first, each.last, each.requests) for each in row.turns] == [
        (1, 1, 1),
        (2, 4, 3),
        (5, 16, 12),
        (17, 40, 24),
    ]
    assert row.turns[1].first_token_s.p50 == 1 / 3
    assert row.turns[1].cached_ratio == 0.06
    assert render_turns([row]).splitlines()[2].split() == [
        *("concurrency", "4", "2", "to", "4", "3", "100", "333.3", "500.0", "500.0", "6%")
    ]
    assert row_of(POINT, results[:1], 1.0, 0.1).turns == []


def test_answers_that_are_shorter_than_asked_for_are_noted_unless_they_may_be() -> None:
    short = Result("done", first_s=0.1, events=2, completion_tokens=2, asked_tokens=5)
    row = row_of(POINT, [short, short], 1.0, 0.1)
    assert row.short_answers == 2
    assert "concurrency 4: 2 answers have fewer tokens than were asked for: the endpoint ignores" in render([row])
    assert row_of(POINT, [short], 1.0, 0.1, key=RowKey(may_stop=True)).short_answers == 0


def test_goodput_counts_requests_within_the_targets_and_a_target_that_is_missed_is_named() -> None:
    results = [
        Result("done", first_s=0.1 * number, last_s=0.1 * number + 1.0, gaps_s=(0.1,) * 10, events=11)
        for number in range(1, 11)
    ]
    key = RowKey(terms=Terms({"ttft_p90": 0.45, "itl_p50": 0.2}, gpus=2, price=3.6, gpu_watts=700))
    row = row_of(POINT, results, 10.0, 0.1, key=key)
    assert row.missed == {"ttft_p90": 0.9 / 0.45}
    assert row.good_per_s == 0.4
    assert row.tokens_per_gpu_hour == 11 * 3600 / 2
    assert row.price_per_million_tokens == 1e6 * 3.6 * 2 / (11 * 3600)
    assert row.watt_hours_per_million_tokens == 1e6 * 700 * 2 / (11 * 3600)
    line = render_terms([row]).splitlines()[1].split()
    assert line == ["concurrency", "4", "0.40", "ttft_p90", "200%", "19,800", "181.82", "35,354"]
    assert render_terms([row_of(POINT, results, 10.0, 0.1)]) == ""


def test_an_answer_whose_tokens_have_no_times_is_neither_fast_nor_good_and_is_noted() -> None:
    whole = Result("done", first_s=0.9, last_s=0.9, ended_s=0.9, events=1, completion_tokens=50, asked_tokens=50)
    silent = Result("done", ended_s=0.9, completion_tokens=50, asked_tokens=50)
    key = RowKey(terms=Terms({"ttft_p90": 1.0, "itl_p50": 0.2}))
    row = row_of(POINT, [DONE, whole, silent], 1.0, 0.1, key=key)
    assert (row.time_per_token_s.p50, row.time_per_token_s.max) == (0.1, 0.1)
    assert row.good_per_s == 1.0
    assert row.untimed == 2
    assert "concurrency 4: 2 answers came in one piece, or without text" in render([row])
    first_alone = RowKey(terms=Terms({"ttft_p90": 1.0}))
    assert row_of(POINT, [whole, silent], 1.0, 0.1, key=first_alone).good_per_s == 1.0, "no first token is not early"


def test_an_answer_of_one_token_has_no_time_between_tokens_to_miss() -> None:
    one = Result("done", first_s=0.1, last_s=0.1, events=1, completion_tokens=1, asked_tokens=1)
    row = row_of(POINT, [one], 1.0, 0.1, key=RowKey(terms=Terms({"itl_p50": 0.2})))
    assert (row.good_per_s, row.untimed) == (1.0, 0)


def test_an_open_loop_whose_driver_does_not_keep_up_is_noted() -> None:
    point = Point("open", 1000.0, 20)
    behind = [Result("done", first_s=0.1, late_s=0.01 * number, turn=1) for number in range(20)]
    later_turns = [Result("done", first_s=0.1, turn=2)] * 200
    row = row_of(point, [*behind, *later_turns], 15.0, 0.1)
    assert row.late_s == 0.17
    assert "one request of ten was sent 0.17 s late or later: this driver is too slow" in render([row])
    assert "late" not in render([row_of(point, behind[:10], 15.0, 0.1)])


def test_a_queue_grows_if_first_tokens_come_later_and_later() -> None:
    point = Point("open", 2.0, 30)
    calm = [Result("done", first_s=0.1 + 0.1 * (number % 3), sent_at_s=number / 2) for number in range(30)]
    assert row_of(point, calm, 15.0, 0.1).queue_grows is False
    late = [Result("done", first_s=0.1 + 0.1 * number, sent_at_s=number / 2) for number in range(30)]
    row = row_of(point, late[::-1], 15.0, 0.1)
    assert row.queue_grows is True
    assert "rate 2: first tokens came later and later" in render([row])
    assert row_of(POINT, late, 15.0, 0.1).queue_grows is None  # a closed loop has no queue that grows
    assert row_of(point, late[:5], 15.0, 0.1).queue_grows is None
