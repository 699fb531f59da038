"""deploy/local/autoscale/watch.py: what counts of a look at a fleet, and when it is not complete."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.local.autoscale.watch import kv_tokens, quietest, seen
from deploy.local.show.overview import InstanceRow, Look, ModelRow, Overview
from deploy.local.show.rates import Sample, sample
from shared.messages.load import LoadReport

METRICS = """\
headrace_requests_total{operation="chat",status="200",model="m"} 90.0
headrace_requests_total{operation="chat",status="503",model="m"} 7.0
headrace_requests_total{operation="chat",status="429",model="m"} 3.0
headrace_inflight_requests 4.0
headrace_prompt_tokens_total{model="m"} 20000.0
headrace_input_sequence_tokens_bucket{model="m",le="+Inf"} 95.0
headrace_input_sequence_tokens_count{model="m"} 95.0
headrace_input_sequence_tokens_sum{model="m"} 20000.0
headrace_output_sequence_tokens_count{model="m"} 90.0
headrace_output_sequence_tokens_sum{model="m"} 4500.0
headrace_cached_tokens_total{tier="device",model="m"} 1000.0
headrace_cached_tokens_total{tier="host",model="m"} 500.0
"""


def row(service: str, name: str, *, role: str = "", load: LoadReport | None = None, state: str = "") -> InstanceRow:
    pid = int(name[1:])
    return InstanceRow(service, name, 0, pid, True, "here", 100.0, "1", "", role=role, load=load, state=state)


def load(name: str, running: int = 1) -> LoadReport:
    return LoadReport(name, 0, 0, 2, running, 300, 100, 10, 10)


def looked(rows: Sequence[InstanceRow], *, connected: bool = True, served: Sequence[str] = ("w1", "w2")) -> Look:
    models = (ModelRow("m", tuple(served), 4096, 16, 200, 0, 0),) if served else ()
    return Look(Overview("default", "", "", tuple(rows), models, (), (), ()), connected=connected)


FRONTEND = row("frontend", "f1")
WORKERS = [row("worker", "w1", role="aggregated", load=load("w1")), row("worker", "w2", load=load("w2", 5))]
BEFORE = {"f1": Sample(10.0)}


def now(at_s: float = 15.0) -> dict[str, Sample]:
    return {"f1": sample("frontend", METRICS, at_s)}


def test_counts_are_what_grew_between_two_looks_and_refusals_count_as_requests_too() -> None:
    found = seen(looked([FRONTEND, *WORKERS]), BEFORE, now())
    counts = found.counts
    assert found.complete
    assert (counts.over_s, counts.prompts, counts.refused) == (5.0, 95.0, 10.0)
    assert (counts.prompt_tokens, counts.cached_tokens) == (20000.0, 1500.0)
    assert (counts.answers, counts.answer_tokens) == (90.0, 4500.0)
    assert (found.in_flight, found.waiting_tokens, found.held) == (4, 600, 10)
    assert found.serving == found.alive == {"aggregated": 2}


def test_a_counter_that_starts_again_is_never_a_negative_number() -> None:
    counts = seen(looked([FRONTEND, *WORKERS]), now(10.0), {"f1": Sample(15.0)}).counts
    assert min(counts.prompts, counts.refused, counts.prompt_tokens, counts.answers) == 0


def test_nothing_is_complete_while_something_does_not_answer() -> None:
    silent = row("worker", "w2")
    assert not seen(looked([FRONTEND, WORKERS[0], silent]), BEFORE, now()).complete, "a worker"
    assert not seen(looked([FRONTEND, *WORKERS]), BEFORE, {}).complete, "the frontend"
    assert not seen(looked(WORKERS), {}, {}).complete, "there is no frontend"
    assert not seen(looked([FRONTEND, *WORKERS], connected=False), BEFORE, now()).complete, "NATS"
    gone = {**BEFORE, "f9": Sample(10.0)}
    assert not seen(looked([FRONTEND, *WORKERS]), gone, now()).complete, "a frontend has gone with its counts"


def test_a_number_that_is_none_is_taken_for_nothing_seen() -> None:
    strange = sample("frontend", METRICS.replace("20000.0", "NaN"), 15.0)
    found = seen(looked([FRONTEND, *WORKERS]), BEFORE, {"f1": strange})
    assert not found.complete
    assert found.counts.prompt_tokens == found.counts.prompts == 0


def test_workers_that_start_or_drain_are_alive_and_do_not_serve() -> None:
    rows = [FRONTEND, WORKERS[0], row("worker", "w2", state="draining", load=load("w2")), row("worker", "w3")]
    found = seen(looked(rows), BEFORE, now())
    assert found.complete
    assert (found.serving, found.alive) == ({"aggregated": 1}, {"aggregated": 3})
    split = [row("worker", "w1", role="prefill", load=load("w1")), row("worker", "w2", role="decode", load=load("w2"))]
    assert seen(looked([FRONTEND, *split]), BEFORE, now()).serving == {"prefill": 1, "decode": 1}


def test_a_fleet_of_no_workers_is_seen_completely() -> None:
    found = seen(looked([FRONTEND], served=()), BEFORE, now())
    assert found.complete
    assert not found.alive


def test_the_quietest_worker_leaves_first_and_the_least_room_for_kv_counts() -> None:
    assert quietest([FRONTEND, *reversed(WORKERS)]) == [1, 2]
    assert kv_tokens(looked([FRONTEND, *WORKERS])) == 1600
    assert kv_tokens(looked([FRONTEND])) == 0
