"""services/frontend/serving/text_suspects.py: which servers are passed over, and when they are tried again."""

from __future__ import annotations

from services.frontend.serving.text_suspects import FAULTS, PAUSE_S, SERVERS_LIMIT, ServerSuspects


def failing(suspects: ServerSuspects, instance: str, now_s: float, times: int = FAULTS) -> None:
    for _ in range(times):
        suspects.fault(instance, now_s)


def test_a_server_is_passed_over_after_some_faults_in_a_row() -> None:
    suspects = ServerSuspects()
    failing(suspects, "a", 1.0, FAULTS - 1)
    assert suspects.passed_over(1.0) == []
    suspects.answered("a")
    failing(suspects, "a", 1.0, FAULTS - 1)
    assert suspects.passed_over(1.0) == [], "an answer came between"
    suspects.fault("a", 2.0)
    assert suspects.passed_over(2.0) == ["a"]
    suspects.answered("a")
    assert suspects.passed_over(2.0) == []
    suspects.validate()


def test_one_request_after_each_pause_may_try_it() -> None:
    suspects = ServerSuspects()
    failing(suspects, "a", 0.0)
    failing(suspects, "b", 1.0)
    assert suspects.passed_over(PAUSE_S) == ["b"]
    assert suspects.passed_over(PAUSE_S) == ["a", "b"], "another request tries it now"
    suspects.fault("a", PAUSE_S + 0.5)
    assert suspects.passed_over(1.0 + PAUSE_S) == ["a"]
    assert suspects.passed_over(2 * PAUSE_S + 0.4) == ["b", "a"]
    assert suspects.passed_over(2 * PAUSE_S + 0.5) == ["b"]
    suspects.validate()


def test_servers_without_end_are_forgotten() -> None:
    suspects = ServerSuspects()
    for number in range(SERVERS_LIMIT + 10):
        failing(suspects, f"w{number}", 0.0)
    suspects.validate()
    passed_over = suspects.passed_over(0.0)
    assert len(passed_over) == SERVERS_LIMIT
    assert "w9" not in passed_over
