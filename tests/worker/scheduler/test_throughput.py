from __future__ import annotations

import pytest

from services.worker.limits import DECODE_STRETCH
from services.worker.scheduler.throughput import StepBudget, Throughput


def test_the_throughput_is_zero_before_the_first_step() -> None:
    assert Throughput().tokens_per_s == 0.0


def test_long_steps_count_for_more_than_short_ones() -> None:
    throughput = Throughput()
    throughput.record_prefill(8000, 0.4, 0.4, full=True)
    throughput.record_prefill(10, 0.1, 0.5, full=True)
    assert throughput.tokens_per_s == pytest.approx(8010 / 0.5, rel=0.01)


def test_a_slower_engine_is_known_after_some_minutes_of_work() -> None:
    throughput = Throughput()
    for number, tokens in enumerate([*[5000] * 1000, *[1000] * 1000]):
        throughput.record_prefill(tokens, 0.25, 0.25 * number, full=True)
    assert throughput.tokens_per_s == pytest.approx(4000, rel=0.1)


def after(*, pause_s: float, steps: list[tuple[int, float]], full: bool = True, apart_s: float = 0.0) -> float:
    """Return the speed after 25 s at 1,000 tokens a second, a pause, and steps of (tokens, seconds) with pauses between
    them."""
    throughput, now_s = Throughput(), 0.0
    for _ in range(100):
        now_s += 0.25
        throughput.record_prefill(250, 0.25, now_s, full=True)
    now_s += pause_s
    for tokens, elapsed_s in steps:
        now_s += elapsed_s
        throughput.record_prefill(tokens, elapsed_s, now_s, full=full)
        now_s += apart_s
    return throughput.tokens_per_s


def test_after_a_pause_a_full_step_counts_for_half() -> None:
    step = (3000, 0.3)
    assert after(pause_s=1.0, steps=[step]) < 1200
    assert after(pause_s=100.0, steps=[step]) == pytest.approx(5500, rel=0.01)
    assert after(pause_s=100.0, steps=[step] * 5) > 8000, "the next ones count in full"
    assert after(pause_s=0.0, steps=[(100, 200.0)]) > 0.9, "a long step is no pause"


@pytest.mark.parametrize("apart_s", [0.1, 100.0])
def test_a_step_with_few_tokens_of_prompts_only_raises_the_speed(apart_s: float) -> None:
    assert after(pause_s=100.0, steps=[(10, 0.1)] * 1000, full=False, apart_s=apart_s) == pytest.approx(1000)
    assert after(pause_s=100.0, steps=[(300, 0.1)] * 1000, full=False, apart_s=apart_s) > 2000


def test_a_step_that_took_no_time_is_survived() -> None:
    throughput = Throughput()
    throughput.record_prefill(16, 0.0, 0.0, full=True)
    assert throughput.tokens_per_s > 0


def test_a_decode_step_is_a_moving_average_of_the_latest() -> None:
    throughput = Throughput()
    assert throughput.step_s == 0.0
    throughput.record_decode(0.1)
    assert throughput.step_s == 0.1
    throughput.record_decode(0.2)
    assert 0.1 < throughput.step_s < 0.12
    for _ in range(60):
        throughput.record_decode(0.2)
    assert throughput.step_s == pytest.approx(0.2, rel=0.02)


def budget(*, speed: float = 1000.0) -> StepBudget:
    return StepBudget(step_s=0.25, least_tokens=16, most_tokens=4096, first_tokens_per_s=speed)


def test_the_budget_is_what_the_speed_allows_in_the_steps_time() -> None:
    assert budget().tokens == 250


def test_a_prompt_alone_has_longer_steps_where_those_are_allowed() -> None:
    short = StepBudget(step_s=0.1, lone_step_s=0.25, least_tokens=16, most_tokens=4096, first_tokens_per_s=1000.0)
    assert (short.tokens, short.lone_tokens) == (100, 250)
    assert budget().lone_tokens == budget().tokens


def test_a_slower_speed_is_believed_at_once() -> None:
    slow = budget()
    slow.record_step(250, 1, 2.5, 0.0)
    assert slow.tokens == 25


def test_a_faster_speed_is_believed_twofold_a_step() -> None:
    fast = budget()
    fast.record_step(250, 1, 0.001, 0.0)
    assert fast.tokens == 500
    for _ in range(10):
        fast.record_step(fast.tokens, 1, 0.0, 0.0)
    assert fast.tokens == 4096


def test_a_small_slow_step_says_nothing() -> None:
    small = budget()
    small.record_step(3, 1, 0.1, 0.0)
    assert small.tokens == 250


def test_ends_of_prompts_next_to_decodes_do_not_lower_the_throughput() -> None:
    steps = StepBudget(step_s=0.25, short_step_s=0.03, least_tokens=16, most_tokens=4096, first_tokens_per_s=10_000.0)
    now_s = 0.0

    def run(number: int, tokens: int, sequences: int, elapsed_s: float) -> float:
        nonlocal now_s
        for _ in range(number):
            now_s += elapsed_s
            steps.record_step(tokens, sequences, elapsed_s, now_s)
        return steps.throughput.tokens_per_s

    assert run(20, 8 + 9, 9, 0.02) == pytest.approx(17 / 0.02), "nothing else is known"
    assert run(20, 300, 100, 0.03) > 9000, "half of it was decodes, but the rest of the budget was used"
    assert run(10_000, 8 + 9, 9, 0.02) > 9000
    assert run(2000, 250, 100, 0.05) < 6000, "full steps lower it"


def test_the_budget_never_falls_below_its_least() -> None:
    stuck = budget()
    stuck.record_step(250, 1, 1e6, 0.0)
    assert stuck.tokens == 16
    stuck.record_step(16, 1, 0.01, 0.0)
    assert stuck.tokens_per_s > 0


def test_a_short_step_is_never_longer_than_a_step_and_grows_with_what_decoding_takes() -> None:
    short = StepBudget(step_s=0.25, short_step_s=0.03, least_tokens=16, most_tokens=4096, first_tokens_per_s=1000.0)
    assert short.tokens == 30
    short.throughput.step_s = 0.01
    assert short.tokens == 30
    short.throughput.step_s = 0.1
    assert short.tokens == 1000 * 0.1 * DECODE_STRETCH
    short.throughput.step_s = 1.0
    assert short.tokens == 250


def test_a_step_is_expected_to_take_what_decoding_takes_and_longer_where_it_prefills() -> None:
    steps = budget()
    assert steps.expected_s(4, 4) == 0.0, "nothing is known"
    steps.record_step(4, 4, 0.02, 0.0)
    assert (steps.throughput.step_s, steps.throughput.tokens_per_s) == (0.02, 0.0), "it only decoded"
    assert steps.expected_s(4, 4) == 0.02
    assert steps.expected_s(5, 4) == 0.02, "five tokens take less"
    assert steps.expected_s(250, 4) == 0.25
    steps.record_step(0, 0, 5.0, 0.0)
    assert steps.throughput.step_s == 0.02, "nothing was computed"
