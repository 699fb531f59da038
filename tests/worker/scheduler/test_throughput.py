from __future__ import annotations

import pytest

from services.worker.scheduler.throughput import Pace


def test_there_is_no_pace_before_the_first_step() -> None:
    assert Pace().tokens_per_s == 0.0


def test_long_steps_count_for_more_than_short_ones() -> None:
    pace = Pace()
    pace.measured(8000, 0.4)
    pace.measured(10, 0.1)
    assert pace.tokens_per_s == pytest.approx(8010 / 0.5, rel=0.01)


def test_a_slower_engine_is_known_after_some_minutes_of_work() -> None:
    pace = Pace()
    for tokens in [*[5000] * 1000, *[1000] * 1000]:
        pace.measured(tokens, 0.25)
    assert pace.tokens_per_s == pytest.approx(4000, rel=0.1)


def test_a_step_that_took_no_time_is_survived() -> None:
    pace = Pace()
    pace.measured(16, 0.0)
    assert pace.tokens_per_s > 0


def test_a_decode_step_is_a_moving_average_of_the_latest() -> None:
    pace = Pace()
    assert pace.step_s == 0.0
    pace.decoded(0.1)
    assert pace.step_s == 0.1
    pace.decoded(0.2)
    assert 0.1 < pace.step_s < 0.12
    for _ in range(60):
        pace.decoded(0.2)
    assert pace.step_s == pytest.approx(0.2, rel=0.02)
