from __future__ import annotations

from services.worker.scheduler.step_budget import StepBudget


def budget(*, speed: float = 1000.0) -> StepBudget:
    return StepBudget(step_s=0.25, least_tokens=16, most_tokens=4096, first_tokens_per_s=speed)


def test_the_budget_is_what_the_speed_allows_in_the_steps_time() -> None:
    assert budget().tokens == 250


def test_a_slower_speed_is_believed_at_once() -> None:
    slow = budget()
    slow.measured(250, 2.5)
    assert slow.tokens == 25


def test_a_faster_speed_is_believed_twofold_a_step() -> None:
    fast = budget()
    fast.measured(250, 0.001)
    assert fast.tokens == 500
    for _ in range(10):
        fast.measured(fast.tokens, 0.0)
    assert fast.tokens == 4096


def test_a_small_slow_step_says_nothing() -> None:
    small = budget()
    small.measured(3, 0.1)
    assert small.tokens == 250


def test_the_budget_never_falls_below_its_least() -> None:
    stuck = budget()
    stuck.measured(250, 1e6)
    assert stuck.tokens == 16
    stuck.measured(16, 0.01)
    assert stuck.tokens_per_s > 0
