"""Workers that live and get no requests: each kind is found, named, and forgotten when it ends."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.selection.left_out import HEARD_LIMIT, LOOK_LIMIT_S, REPORTED_S, UNUSED_S, LeftOutWorkers
from services.router.selection.load import IDLE, CandidateLoad
from shared.messages.cards import Instance

QUEUE = CandidateLoad(requests=2, queued_tokens=500)
ALONE = CandidateLoad(requests=1, queued_tokens=500)
BUSY = CandidateLoad(requests=3, queued_tokens=0)


def worker(instance: str, state: str = "") -> Instance:
    return Instance("ns", "worker", instance, 1, "machine", 1, 0.0, "1", state=state)


class Fleet:
    """A fleet whose clock is moved by hand."""

    def __init__(self) -> None:
        self.workers = LeftOutWorkers()
        self.now_s = 100.0
        self.known: list[Instance] = [worker("a"), worker("b")]
        self.cards: list[tuple[str, str]] = [("m", "a"), ("m", "b")]
        self.refused: dict[tuple[str, str], str] = {}
        self.look({"m": {}})

    def look(self, loads: Mapping[str, Mapping[str, CandidateLoad]]) -> dict[str, str]:
        found = self.workers.look(self.now_s, self.known, self.cards, self.refused, loads)
        return {each.instance: each.kind for each in found}

    def pass_time(self, seconds: float, loads: Mapping[str, CandidateLoad]) -> dict[str, str]:
        found: dict[str, str] = {}
        for _ in range(round(seconds)):
            self.now_s += 1
            found = self.look({"m": loads})
        return found


def test_a_worker_without_requests_is_unused_once_prompts_have_waited_elsewhere_for_a_minute() -> None:
    fleet = Fleet()
    assert fleet.pass_time(UNUSED_S - 1, {"a": QUEUE, "b": IDLE}) == {}
    assert fleet.pass_time(1, {"a": QUEUE, "b": IDLE}) == {"b": "unused"}
    assert fleet.pass_time(1, {"a": QUEUE, "b": ALONE}) == {}
    assert fleet.pass_time(UNUSED_S - 1, {"a": QUEUE, "b": IDLE}) == {}


def test_a_worker_without_requests_is_not_unused_while_nothing_waits() -> None:
    for elsewhere in (IDLE, BUSY, ALONE):  # a request's own prompt is no queue
        assert Fleet().pass_time(3 * UNUSED_S, {"a": elsewhere, "b": IDLE}) == {}


def test_time_in_which_the_router_was_frozen_counts_little() -> None:
    fleet = Fleet()
    fleet.now_s += 1000
    assert fleet.look({"m": {"a": QUEUE, "b": IDLE}}) == {}
    assert fleet.pass_time(UNUSED_S - LOOK_LIMIT_S, {"a": QUEUE, "b": IDLE}) == {"b": "unused"}


def test_a_worker_that_discovery_does_not_have_is_unregistered_while_it_reports() -> None:
    fleet = Fleet()
    fleet.workers.report_of_unknown("stray", fleet.now_s)
    assert fleet.look({}) == {"stray": "unregistered"}
    fleet.known.append(worker("stray"))
    fleet.cards.append(("m", "stray"))
    assert fleet.look({}) == {}
    fleet.known.pop()
    fleet.workers.report_of_unknown("stray", fleet.now_s)
    fleet.now_s += REPORTED_S
    assert fleet.look({}) == {}


def test_strangers_are_remembered_up_to_a_limit() -> None:
    fleet = Fleet()
    for number in range(HEARD_LIMIT + 3):
        fleet.workers.report_of_unknown(f"w{number}", fleet.now_s)
    found = fleet.look({})
    assert len(found) == HEARD_LIMIT
    assert not found.keys() & {"w0", "w1", "w2"}


def test_workers_without_an_accepted_card_are_named_but_not_those_that_an_operator_took_out() -> None:
    fleet = Fleet()
    fleet.known += [worker("c"), worker("d", state="drained"), worker("e")]
    fleet.refused["m", "c"] = "tokenizer_digest: it differs"
    assert fleet.look({}) == {"c": "refused", "e": "no_card"}
    assert [each.reason for each in fleet.workers.found] == [
        "its card of m is refused: tokenizer_digest: it differs",
        "it is in discovery without a model card",
    ]
