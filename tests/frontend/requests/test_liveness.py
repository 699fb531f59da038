"""services/frontend/requests/liveness.py: verdicts on attempts that have gone quiet, on a clock of the test's own."""

from __future__ import annotations

from services.frontend.requests.liveness import Liveness
from shared.messages.load import LoadReport

ATTEMPT = ("r", 1)
QUIET_S, FROZEN_S = 1.0, 10.0


def pulses() -> Liveness:
    return Liveness(quiet_s=QUIET_S, frozen_s=FROZEN_S)


def report(progress: int, *attempts: tuple[str, int]) -> LoadReport:
    return LoadReport("w1", 1, progress, 0, 0, 0, 100, 0, 0, attempts=list(attempts))


def test_an_attempt_heard_a_moment_ago_is_alive_whatever_the_reports_say() -> None:
    assert pulses().judge("w1", ATTEMPT, 5.0, 5.9) == "alive"


def test_an_attempt_that_the_reports_name_while_progress_grows_is_alive_however_long() -> None:
    seen = pulses()
    for second in range(100):
        seen.report_received(report(second, ATTEMPT), float(second))
        assert seen.judge("w1", ATTEMPT, 0.0, second + 0.5) == "alive"


def test_an_attempt_that_a_later_report_does_not_name_has_ended() -> None:
    seen = pulses()
    seen.report_received(report(1), 0.9)
    assert seen.judge("w1", ATTEMPT, 0.0, 1.1) == "alive", "the report may have left before the attempt came"
    seen.report_received(report(2), 1.1)
    assert seen.judge("w1", ATTEMPT, 0.0, 1.2) == "ended"
    assert seen.judge("w1", ATTEMPT, 1.0, 1.2) == "alive"
    seen.report_received(report(3, ("r", 2)), 1.3)
    assert seen.judge("w1", ATTEMPT, 0.0, 1.4) == "ended", "another attempt is another name"


def test_an_engine_whose_progress_stands_is_frozen_after_its_time() -> None:
    seen = pulses()
    for tenth in range(200):
        now_s = tenth / 10
        seen.report_received(report(7, ATTEMPT), now_s)
        expected = "frozen" if now_s >= FROZEN_S else "alive"
        assert seen.judge("w1", ATTEMPT, 0.0, now_s) == expected, now_s
    seen.report_received(report(8, ATTEMPT), 20.0)
    assert seen.judge("w1", ATTEMPT, 0.0, 20.0) == "alive"


def test_an_engine_that_had_nothing_to_do_is_not_frozen_when_work_comes() -> None:
    seen = pulses()
    seen.report_received(report(7), 0.0)
    seen.report_received(report(7, ATTEMPT), 102.0)
    assert seen.judge("w1", ATTEMPT, 100.0, 102.0) == "alive"


def test_a_worker_without_reports_is_silent_and_then_frozen() -> None:
    seen = pulses()
    assert seen.judge("w1", ATTEMPT, 0.0, 2.0) == "silent"
    seen.report_received(report(1, ATTEMPT), 2.0)
    assert seen.judge("w1", ATTEMPT, 0.0, 2.5) == "alive"
    assert seen.judge("w1", ATTEMPT, 0.0, 3.0) == "silent"
    assert seen.judge("w1", ATTEMPT, 0.0, 12.0) == "frozen"


def test_silence_while_nothing_could_be_heard_does_not_count() -> None:
    seen = pulses()
    seen.report_received(report(1, ATTEMPT), 0.0)
    seen.excuse_silence(60.0)
    assert seen.judge("w1", ATTEMPT, 0.0, 60.5) == "alive"
    assert seen.judge("w1", ATTEMPT, 0.0, 61.0) == "silent"
    assert seen.judge("w1", ATTEMPT, 0.0, 70.0) == "frozen"


def test_a_worker_that_was_forgotten_is_judged_as_one_never_heard() -> None:
    seen = pulses()
    seen.report_received(report(1, ATTEMPT), 5.0)
    seen.forget("w1")
    seen.forget("w1")
    assert seen.judge("w1", ATTEMPT, 0.0, 5.5) == "silent"
