"""The questions of one choice: which router, for how long, and when they end, whatever the answers are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.requests.router_tries import ROUTERS_TRIED, STALE_ROUTER_PAUSE_S, RouterTries, RouterTry
from shared.messages.cards import KvLayout, ModelCard
from shared.messages.select import Overlap, Selected, SelectRefused

CARD = ModelCard("m", "w", "/m", "0", "0", 4096, 1000, 4, 1000, KvLayout("float32", 1, 1, 4, 4))
UNKNOWN = SelectRefused("r", 1, "unknown_model", "who?")


def tries_of(*routers: str, timeout_s: float = 1.0, until_s: float = 100.0, lora: str = "") -> RouterTries:
    return RouterTries("m", lora, timeout_s, until_s, lambda most: routers[:most])


def card(**fields: Any) -> ModelCard:
    return ModelCard(**{name: getattr(CARD, name) for name in CARD.__struct_fields__} | fields)


def asked(tries: RouterTries, now_s: float = 0.0) -> str:
    found = tries.next_try(now_s)
    return "" if found is None else found.addressee


def test_the_queue_group_is_asked_first_and_then_a_few_routers_by_their_id() -> None:
    tries = tries_of("a", "b", "c", "d")
    assert tries.next_try(0.0) == RouterTry("m", 1.0, 0.0, is_retry=False)
    assert tries.next_try(0.5) == RouterTry("a", 1.0, 0.0, is_retry=True)
    assert [asked(tries) for _ in range(3)] == ["b", "c", ""], f"{ROUTERS_TRIED} routers, and none was slow"


def test_if_an_answer_came_too_late_all_are_asked_again_with_twice_the_time() -> None:
    tries = tries_of("a")
    for timeout_s in (1.0, 2.0, 4.0):
        assert tries.next_try(0.0) == RouterTry("m", timeout_s, 0.0, is_retry=timeout_s > 1)
        if timeout_s < 4:
            tries.record_timeout()
        assert tries.next_try(0.0) == RouterTry("a", timeout_s, 0.0, is_retry=True)
    assert tries.next_try(0.0) is None, "in the last round each answered or was not there"


def test_an_answer_that_is_out_of_date_is_asked_for_again_after_a_pause_until_the_time_is_over() -> None:
    tries = tries_of(timeout_s=0.25, until_s=1.0)
    assert asked(tries) == "m"
    assert not tries.accepts(UNKNOWN, [CARD])
    assert tries.next_try(0.5) == RouterTry("m", 0.25, STALE_ROUTER_PAUSE_S, is_retry=False)
    assert tries.next_try(0.96) is None
    assert tries.stale == UNKNOWN


def test_a_refusal_is_out_of_date_only_if_a_known_worker_could_serve_the_request() -> None:
    assert tries_of().accepts(UNKNOWN, [])
    assert tries_of().accepts(UNKNOWN, [card(model="other"), card(role="prefill")])
    assert tries_of(lora="l").accepts(UNKNOWN, [CARD])
    assert not tries_of(lora="l").accepts(UNKNOWN, [CARD, card(lora=("l",))])
    assert tries_of().accepts(SelectRefused("r", 1, "all_excluded", ""), [CARD])
    assert tries_of().accepts(Selected("r", 1, "w", 0, "router", Overlap(), "best"), [CARD])


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["timeout", "gone", "stale"]), st.floats(0.0, 1.0)), max_size=100),
)
def test_whatever_the_answers_no_question_outlasts_the_time_and_the_questions_end(
    routers: int, answers: list[tuple[str, float]]
) -> None:
    tries, now_s = tries_of(*map(str, range(routers)), until_s=5.0), 0.0
    troubled = False
    for outcome, share in answers:
        found = tries.next_try(now_s)
        if found is None:
            break
        assert found.timeout_s > 0
        assert now_s + found.pause_s + found.timeout_s <= 5.0 + 1e-9
        now_s += found.pause_s + (found.timeout_s if outcome == "timeout" else share * found.timeout_s)
        if outcome == "timeout":
            tries.record_timeout()
        elif outcome == "stale":
            assert not tries.accepts(UNKNOWN, [CARD])
        troubled |= outcome != "gone"
    else:
        found = tries.next_try(now_s)
    assert now_s <= 5.0 + 1e-9
    if not troubled and len(answers) > ROUTERS_TRIED + 1:
        assert found is None
