"""Tokens a second from totals."""

from __future__ import annotations

from shared.messages.load import LoadReport
from shared.token_rates import TokenRates


def report(tokens: int, instance: str = "w1") -> LoadReport:
    return LoadReport(instance, 1, 0, 0, 0, 0, 0, 0, 0, output_tokens=tokens)


def test_a_rate_needs_two_reports() -> None:
    rates = TokenRates()
    assert rates.update(report(100), 1.0) is None
    assert rates.update(report(150), 3.0) == 25.0


def test_a_report_that_is_given_again_changes_nothing() -> None:
    rates = TokenRates()
    rates.update(report(100), 1.0)
    rates.update(report(150), 2.0)
    assert rates.update(report(150), 2.0) == 50.0


def test_a_total_that_falls_is_no_negative_rate() -> None:
    rates = TokenRates()
    rates.update(report(100), 1.0)
    assert rates.update(report(10), 2.0) == 0.0


def test_workers_that_are_gone_are_forgotten() -> None:
    rates = TokenRates()
    rates.update(report(100, "w1"), 1.0)
    rates.update(report(100, "w2"), 1.0)
    rates.forget_all_but({"w2"})
    assert rates.update(report(200, "w1"), 2.0) is None
    assert rates.update(report(200, "w2"), 2.0) == 100.0
