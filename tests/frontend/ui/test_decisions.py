"""The routers' answers as the page shows them."""

from __future__ import annotations

from services.frontend.ui.decisions import DECISIONS_SHOWN, merged
from shared.messages.people import Explanation, Explanations

OWN = "0123456789abcdef" * 2


def explanation(age_s: float, request: str = OWN) -> Explanation:
    return Explanation("m", "r1", request, 1, age_s, "w1", 0, "least", (), 10, 0)


def test_decisions_of_all_routers_come_oldest_first() -> None:
    found = merged([Explanations("r1", [explanation(1.0)]), Explanations("r2", [explanation(3.0)])], 3)
    assert [one.age_s for one in found.decisions] == [3.0, 1.0]
    assert (found.routers, found.silent, found.left_out) == (2, 1, 0)


def test_no_whole_id_leaves_since_it_opens_a_stored_response() -> None:
    (one,) = merged([Explanations("r1", [explanation(1.0, f"mine-{OWN}/3")])], 1).decisions
    assert one.request == OWN[:12]


def test_beyond_the_limit_the_oldest_are_left_out() -> None:
    many = Explanations("r1", [explanation(float(age)) for age in range(DECISIONS_SHOWN + 5)])
    found = merged([many], 1)
    assert len(found.decisions) == DECISIONS_SHOWN
    assert found.left_out == 5
    assert found.decisions[-1].age_s == 0.0
