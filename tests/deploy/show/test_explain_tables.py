"""deploy/local/show/explain_tables.py: the routers' explanations as people read them."""

from __future__ import annotations

import msgspec

from deploy.local.show.explain_tables import LATEST, merge, render_candidates, render_list
from shared.messages.people import Explanation, Explanations
from shared.messages.select import Candidate, Overlap

CHOICE = Explanation(
    model="m",
    router="r1",
    request="abc",
    attempt=1,
    age_s=75.0,
    instance="w2",
    rank=0,
    reason="most cached",
    candidates=(
        Candidate("w2", 0, Overlap(20, 4, 1), 12.25, 30, 256, "most cached", 0.125),
        Candidate("w1", 0, Overlap(), 31.0, 7, 0, "idle"),
    ),
    prompt_tokens=410,
    predicted_cached_tokens=400,
)


def test_a_choice_stands_with_its_candidates_and_what_came_of_it() -> None:
    told = msgspec.structs.replace(CHOICE, actual_cached_tokens=384, first_token_s=0.131, ended_s=12.7)
    assert render_candidates([told]).splitlines() == [
        "request abc, attempt 1, 1m ago",
        "model m, chosen by router r1: most cached",
        "",
        "   INSTANCE  RANK  DEVICE  HOST  DISK  HELD  QUEUED  PREDICTED  SCORE  REASON",
        "*  w2        0     20      4     1     30    256     125 ms     12.25  most cached",
        "   w1        0     0       0     0     7     0       ?          31     idle",
        "",
        "cached tokens      400 predicted, 384 found of 410",
        "first token after  125 ms predicted, 131 ms as the client saw it",
        "ended              13 s after the choice",
    ]


def test_a_lora_stands_next_to_its_model() -> None:
    asked = msgspec.structs.replace(CHOICE, lora="sql@0123")
    assert (
        render_candidates([asked]).splitlines()[1] == "model m with the LoRA sql@0123, chosen by router r1: most cached"
    )


def test_a_traced_request_names_its_trace() -> None:
    asked = msgspec.structs.replace(CHOICE, trace="4bf92f3577b34da6a3ce929d0e0e4736")
    assert render_candidates([asked]).splitlines()[2] == "trace 4bf92f3577b34da6a3ce929d0e0e4736"


def test_workers_that_could_not_be_chosen_stand_below_the_candidates() -> None:
    asked = msgspec.structs.replace(CHOICE, passed_over={"w3": "frozen", "w4": "it has just joined, and ramps up"})
    assert render_candidates([asked]).splitlines()[5:10] == [
        "   w1        0     0       0     0     7     0       ?          31     idle",
        "",
        "w3 was passed over: frozen",
        "w4 was passed over: it has just joined, and ramps up",
        "",
    ]


def test_what_is_not_known_yet_is_said_in_words() -> None:
    assert render_candidates([CHOICE]).splitlines()[-3:] == [
        "cached tokens      400 predicted, not reported yet of 410",
        "first token after  125 ms predicted, not reported yet",
        "ended              not yet",
    ]
    continued = msgspec.structs.replace(CHOICE, candidates=CHOICE.candidates[1:], actual_cached_tokens=0)
    assert "first token after  sent by an earlier attempt" in render_candidates([continued])


def test_the_attempts_of_a_request_come_from_all_routers_in_order() -> None:
    second = msgspec.structs.replace(CHOICE, attempt=2, router="r2", age_s=70.0)
    found = merge([Explanations("r2", [second]), Explanations("r3", []), Explanations("r1", [CHOICE])], latest=False)
    assert found == [CHOICE, second]
    assert [line for line in render_candidates(found).splitlines() if line.startswith("request")] == [
        "request abc, attempt 1, 1m ago",
        "request abc, attempt 2, 1m ago",
    ]


def test_the_latest_choices_are_a_line_each_and_bounded() -> None:
    many = [msgspec.structs.replace(CHOICE, request=f"q{number}", age_s=100.0 - number) for number in range(30)]
    found = merge([Explanations("r1", many[::2]), Explanations("r2", many[1::2])], latest=True)
    assert [each.request for each in found] == [f"q{number}" for number in range(30 - LATEST, 30)]
    last = msgspec.structs.replace(found[-1], actual_cached_tokens=384, first_token_s=0.131, ended_s=2.0)
    assert render_list([found[-2], last]).splitlines() == [
        "AGO  REQUEST  ATTEMPT  INSTANCE  PROMPT  PREDICTED  FOUND  FIRST TOKEN  ENDED    REASON",
        "1m   q28      1        w2        410     400                                     most cached",
        "1m   q29      1        w2        410     400        384    131 ms       2000 ms  most cached",
    ]
