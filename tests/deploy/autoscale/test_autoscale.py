from __future__ import annotations

from deploy.local.autoscale.autoscale import FIRST_PAUSE_S, LAST_PAUSE_S, pause_after


def test_a_launcher_that_refuses_for_weeks_is_asked_ever_later_and_no_number_overflows() -> None:
    assert [pause_after(refusals) for refusals in (0, 1, 2, 10_000)] == [FIRST_PAUSE_S, 20.0, 40.0, LAST_PAUSE_S]
