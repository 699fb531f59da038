"""deploy/local/top/model.py: what is known after some looks, and the view of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deploy.local.show.overview import Look
from deploy.local.show.rates import GONE_SHOWN, Sample
from deploy.local.top.keys import ORDERS, Controls
from deploy.local.top.model import WINDOW_LINES, WORKERS_KNOWN, Known, View
from deploy.local.top.tables import LINES_KEPT, Bar
from shared.messages.frontends import RecentRequests
from tests.deploy.top.views import entry, load, look, store, way, worker

THREE = worker("a") | worker("b", model="other") | worker("c")
NONE = Controls()
LOADS = (load("a", held=10, waiting=2), load("b", held=30, running=3), load("c", held=20, running=4, waiting=1))


def learned(*looks: Look, samples: Mapping[str, Sample] = {}) -> Known:
    known = Known()
    for number, each in enumerate(looks):
        known.learn(each, samples, (), 10.0 + 2 * number)
    return known


def seen(known: Known, controls: Controls = NONE) -> View:
    return known.view(controls, "12:00:00")


def names(view: View) -> list[str]:
    return [str(line.cells[0]) for line in view.workers.lines]


def states(view: View) -> dict[str, str]:
    return {str(line.cells[0]): str(line.cells[1]) for line in view.workers.lines}


def test_before_the_first_look_there_is_a_view_too() -> None:
    assert seen(Known()).head == ("12:00:00", "looking …")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        *(("worker", "abc"), ("load", "bca"), ("running", "cba"), ("waiting", "acb"), ("tokens/s", "abc")),
        ("state", "abc"),
    ],
)
def test_orders(order: str, expected: str) -> None:
    known = learned(look(THREE, LOADS))
    chosen = Controls(order=ORDERS.index(order))
    assert "".join(names(seen(known, chosen))) == expected
    turned = Controls(order=ORDERS.index(order), reversed=True)
    assert "".join(names(seen(known, turned))) == expected[::-1]


def test_the_filter_finds_names_models_states_and_machines_without_regard_to_case() -> None:
    known = learned(look(THREE | worker("d", state="draining"), [*LOADS, load("d")]))
    assert names(seen(known, Controls(filter="OTHER"))) == ["b"]
    assert names(seen(known, Controls(filter="drain"))) == ["d"]
    assert names(seen(known, Controls(filter="M1"))) == ["a", "b", "c", "d"]
    nothing = seen(known, Controls(filter="[", offset=3))
    assert (names(nothing), nothing.chosen, nothing.all, nothing.offset) == ([], 0, 4, 0)


def test_sums_and_tokens_a_second_come_from_load_reports() -> None:
    first = [load("a", held=10, cached=5, tokens=100), load("b", held=30, running=3, waiting=2, tokens=50)]
    known = learned(look(THREE, first, 10.0), look(THREE, [load("a", tokens=300), load("b", tokens=50)], 12.0))
    view = seen(known)
    assert view.head[2:5] == ("running 0", "waiting 0", "tokens/s 100")
    assert [line.cells[-3] for line in view.workers.lines] == ["100", "0", "-"]
    first_view = seen(learned(look(THREE, first, 10.0)))
    assert first_view.head[2:5] == ("running 3", "waiting 2", "tokens/s -")
    assert first_view.fill == Bar(40, 5, 200)


def test_streams_first_tokens_and_hits_come_from_the_frontends() -> None:
    known = Known()
    known.learn(look(THREE), {"f1": Sample(10.0, {"requests": 5, "asked_tokens": 100})}, (), 10.0)
    assert "streams 0" in seen(known).head
    assert "requests/s -" in seen(known).head
    late = Sample(12.0, {"requests": 9, "asked_tokens": 300}, {0.5: 4.0}, {"device": 50, "host": 20}, 7)
    known.learn(look(THREE), {"f1": late}, ("no answer: frontend f2",), 12.0)
    view = seen(known)
    assert {"streams 7", "requests/s 2", "hits device 25 % host 10 % disk 0 %"} < set(view.head)
    assert "ttft p50 250 ms p90 450 ms" in view.head
    assert view.notes == ("no answer: frontend f2",)


def test_roles_are_shown_and_found_and_hand_overs_are_counted_where_a_worker_computes_prompts_alone() -> None:
    apart = worker("p", role="prefill") | worker("d", role="decode") | worker("a")
    known = Known()
    known.learn(look(apart), {"f1": Sample(10.0, {"hand_overs": 5})}, (), 10.0)
    assert "hand-overs/s -" in seen(known).head
    known.learn(look(apart), {"f1": Sample(12.0, {"hand_overs": 9})}, (), 12.0)
    assert "hand-overs/s 2" in seen(known).head
    assert {str(line.cells[0]): line.cells[2] for line in seen(known).workers.lines} == {
        "a": "",
        "d": "decode",
        "p": "prefill",
    }
    assert names(seen(known, Controls(filter="PREFILL"))) == ["p"]
    without = learned(look(THREE), look(THREE), samples={"f1": Sample(10.0)})
    assert not any("hand-overs" in each for each in seen(without).head)


def test_without_the_frontends_metrics_streams_are_what_they_say_over_nats() -> None:
    known = learned(look(THREE | entry("frontend", "f1"), recent=[RecentRequests("f1", 1, 4, 9, [])]))
    assert "streams 5" in seen(known).head
    assert "streams -" in seen(learned(look(THREE))).head


def test_states() -> None:
    values = THREE | entry("worker", "n") | worker("d", state="drained") | worker("z", state="asleep")
    known = learned(look(values, [*LOADS[:2], load("d"), load("z")]))
    expected = {"a": "ready", "b": "ready", "c": "silent", "d": "drained", "n": "starting", "z": "asleep"}
    assert states(seen(known)) == expected
    known.learn(look(values, LOADS[1:], 12.0), {}, (), 12.0)
    assert states(seen(known)) | {"d": "", "z": ""} == expected | {"a": "silent 2s", "c": "ready", "d": "", "z": ""}
    assert seen(known).workers.lines[0].old
    del values["/headrace/default/instances/worker/b"]
    known.learn(look(values, LOADS, 15.0), {}, (), 15.0)
    assert states(seen(known))["b"] == "gone 0s"
    known.learn(look(values, LOADS, 20.0), {}, (), 20.0)
    assert states(seen(known))["b"] == "gone 5s"
    assert seen(known).all == len(values) // 2 + 1


def test_while_nats_is_away_the_last_values_stay_and_are_marked_old() -> None:
    values = THREE | entry("kvbm", "k1") | entry("frontend", "f1")
    recent = [RecentRequests("f1", 0, 1, 1, [way("r1", "a", "b")])]
    known = learned(look(values, LOADS, 10.0, stores=[store("k1")], recent=recent))
    known.learn(look(values, notes=["NATS is away"], connected=False), {}, (), 40.0)
    view = seen(known)
    assert "values 30s old" in view.head
    assert view.notes[0] == "NATS is away"
    assert states(view) == dict.fromkeys("abc", "silent 30s")
    assert [line.cells[6] for line in view.workers.lines] == ["0", "3", "4"]
    assert all(line.old for listing in (view.workers, *view.others) for line in listing.lines)
    assert view.others[0].lines[0].cells[4] == "50 %"
    known.learn(look(values, LOADS, 50.0), {}, (), 50.0)
    assert not any(each.startswith("values") for each in seen(known).head)


def test_services_that_are_gone_are_noted_with_refused_cards_and_unreadable_keys() -> None:
    known = learned(look(THREE | entry("router", "r1")), look(THREE | {"/headrace/default/instances/x": b"{"}))
    notes = seen(known).notes
    assert notes[0] == "gone: router r1, 0s ago"
    assert notes[1].startswith("unreadable: /headrace/default/instances/x: ")


def test_a_fleet_of_thousands_is_bounded_and_the_view_says_what_it_leaves_out() -> None:
    count = WORKERS_KNOWN + 100
    values = {key: each for number in range(count) for key, each in worker(f"w{number:05}").items()}
    loads = [load(f"w{number:05}", held=number % 100) for number in range(count)]
    known = learned(look(values, loads, notes=[f"n{number}" for number in range(99)]))
    view = seen(known, Controls(offset=1000))
    assert len(view.workers.lines) == WINDOW_LINES
    assert view.workers.lines[0].cells[0] == "w01000"
    assert (view.offset, view.chosen, view.all, view.workers.left_out) == (1000, WORKERS_KNOWN, count, 100)
    assert (len(view.notes), view.notes_left_out) == (LINES_KEPT, 99 - LINES_KEPT)
    assert seen(known, Controls(offset=10**9)).offset == WORKERS_KNOWN - 1
    few = learned(look(dict(list(values.items())[:400])), look({}))
    assert (seen(few).all, set(states(seen(few)).values())) == (GONE_SHOWN, {"gone 0s"})


def test_texts_of_other_processes_are_plain() -> None:
    values = worker("a", model="\x1b]0;title\x07[red]m", state="\x1b[2Jdraining")
    known = learned(look(values, [load("a")], notes=["\x1b[31mnote\n"]))
    view = seen(known)
    assert view.workers.lines[0].cells[1:4] == ("[2Jdraining", "", "]0;title[red]m")
    assert view.notes == ("[31mnote",)
