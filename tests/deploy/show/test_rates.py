"""deploy/local/show/rates.py: rates and quantiles, of metrics as the services write them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from deploy.local.show.rates import (
    GONE_SHOWN,
    GONE_SHOWN_S,
    TOTALS,
    Rates,
    Sample,
    departures,
    quantile,
    rates,
    render_rates,
    sample,
)
from services.frontend.metrics import Metrics
from services.worker.metrics import WorkerMetrics
from shared.messages.frames import Part
from shared.messages.generate import Accepted

INF = float("inf")


def test_what_the_services_count_is_found_in_their_metrics() -> None:
    registry = CollectorRegistry()
    frontend = Metrics(registry)
    for status in (200, 200, 200, 503):
        frontend.count_request("chat", status, "m", 0.5)
    frontend.of_model("m").first_token.observe(0.03)
    frontend.inflight.set(2)
    found = sample("frontend", generate_latest(registry).decode(), 5.0)
    none = dict.fromkeys(("asked_tokens", "hand_overs", "prompts", "answers", "answer_tokens"), 0)
    assert found.totals == {"requests": 4, "refused": 1, **none}
    assert found.cached == {"device": 0, "host": 0, "disk": 0}
    assert found.inflight == 2
    assert (found.first_tokens[0.025], found.first_tokens[0.05], found.first_tokens[INF]) == (0, 1, 1)

    registry = CollectorRegistry()
    worker = WorkerMetrics(registry)
    worker.count_reply(Accepted("a", attempt=1), 100)
    worker.count_part(Part("a", 1, 0, b"\0" * 28, finish="stop"))
    found = sample("worker", generate_latest(registry).decode(), 5.0)
    assert found.totals == {"tokens": 7, "prompt_tokens": 100}, "attempts are no requests"
    assert sample("router", generate_latest(registry).decode(), 5.0) == Sample(5.0)


def test_rates_are_those_of_the_processes_that_were_asked_twice() -> None:
    before = {
        "f1": Sample(10.0, {"requests": 100}, {0.5: 10, INF: 100}),
        "w1": Sample(10.0, {"tokens": 1000}),
        "gone": Sample(10.0, {"tokens": 5000}),
    }
    after = {
        "f1": Sample(12.0, {"requests": 106}, {0.5: 18, INF: 110}),
        "w1": Sample(12.5, {"tokens": 1500, "prompt_tokens": 50}),
        "new": Sample(12.0, {"tokens": 7000}),
    }
    seen = rates(before, after)
    per_s = dict.fromkeys(TOTALS.values(), 0.0) | {"requests": 3.0, "tokens": 200.0, "prompt_tokens": 20.0}
    assert seen == Rates(2.5, per_s, 0.3125, 0.5)
    head, row = render_rates(seen).splitlines()
    assert head.split("  ")[0] == "REQUESTS/S"
    assert row.split("  ")[0] == "3"
    assert row.endswith("200       20               312 ms    500 ms    2.5s")


def test_without_two_looks_nothing_is_known() -> None:
    assert rates({}, {"f1": Sample(1.0, {"requests": 5})}) == Rates()
    assert set(render_rates(Rates()).splitlines()[1].split()) == {"-"}


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, {}, None),
        (0.5, {1.0: 0, INF: 0}, None),
        (0.5, {1.0: 0, 2.0: 10, INF: 10}, 1.5),
        (0.9, {1.0: 10, 2.0: 10, INF: 10}, 0.9),
        (0.9, {1.0: 5, INF: 10}, 1.0),
        (0.5, {1.0: 5, INF: 10}, 1.0),
    ],
)
def test_a_quantile_lies_inside_its_bucket(share: float, counts: dict[float, float], expected: float | None) -> None:
    assert quantile(share, counts) == expected


def test_what_is_no_text_of_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        sample("frontend", "headrace_requests_total not a number\n", 0.0)


def test_processes_that_are_gone_stay_in_the_view_for_a_while_and_are_bounded() -> None:
    gone = departures({"a": "worker", "b": "router"}, {"b": "router"}, {}, 10.0)
    assert gone == {"a": ("worker", 10.0)}
    assert departures({"b": "router"}, {"b": "router"}, gone, 10.0 + GONE_SHOWN_S) == {}
    assert departures({"b": "router"}, {"a": "worker", "b": "router"}, gone, 11.0) == {}
    many = {f"w{number:03}": "worker" for number in range(200)}
    assert list(departures(many, {}, {}, 10.0)) == [f"w{number:03}" for number in range(200 - GONE_SHOWN, 200)]


def test_hit_rates_are_shares_of_the_prompts_of_the_same_interval() -> None:
    before = {"f1": Sample(10.0, {"asked_tokens": 1000}, {}, {"device": 900}), "f2": Sample(10.0)}
    asked = {"f1": Sample(12.0, {"asked_tokens": 1300}, {}, {"device": 950, "host": 25}), "f2": Sample(12.0)}
    assert rates(before, asked).hits == {"device": 50 / 300, "host": 25 / 300, "disk": 0}
    assert rates(asked, asked | {"f1": Sample(13.0, asked["f1"].totals, {}, asked["f1"].cached)}).hits == {}
