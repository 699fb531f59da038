"""How many tokens a step of vLLM may have, on a clock of the test's own."""

from __future__ import annotations

import pytest

from services.worker.vllm.step_pace import StepPace


class Core:
    """A core that computes a token in `token_s` and a step in 5 ms at least. `ahead` steps are scheduled before one
    ends, as vLLM's asynchronous scheduler does."""

    def __init__(self, *, step_s: float, token_s: float, ahead: int = 0, most_tokens: int = 8192) -> None:
        self.pace = StepPace(step_s=step_s, least_tokens=16, most_tokens=most_tokens)
        self.token_s = token_s
        self.now_s = 100.0
        self._under_way: list[tuple[int, int]] = []
        self._ahead = ahead

    def step(self, waiting: int, decoding: int = 0) -> tuple[int, float]:
        """Schedule a step, of which decodes take a token each and prompts what is left. Return its tokens, and the
        seconds that the step which ended meanwhile took."""
        tokens = decoding + min(waiting, self.pace.allow_tokens(decoding) - decoding)
        self.pace.scheduled(self.now_s)
        self._under_way.append((tokens, decoding + (tokens > decoding)))
        if len(self._under_way) <= self._ahead:
            return tokens, 0.0
        ended, sequences = self._under_way.pop(0)
        took_s = max(0.005, ended * self.token_s)
        self.now_s += took_s
        self.pace.processed(ended, sequences, self.now_s)
        return tokens, took_s


@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_with_prompts_come_to_take_the_time_they_may(ahead: int) -> None:
    core = Core(step_s=0.05, token_s=27e-6, ahead=ahead)
    taken = [core.step(10_000, decoding=32)[1] for _ in range(40)]
    assert max(taken) < 0.051
    assert taken[-1] == pytest.approx(0.05, rel=0.02)


def test_a_slower_device_shows_in_the_next_step() -> None:
    core = Core(step_s=0.05, token_s=27e-6)
    for _ in range(40):
        core.step(10_000)
    core.token_s *= 4
    core.step(10_000)
    assert core.step(10_000)[1] < 0.051


def test_a_step_has_room_for_all_answers_and_some_of_a_prompt() -> None:
    pace = StepPace(step_s=1e-6, least_tokens=16, most_tokens=8192)
    assert pace.allow_tokens(0) == 16
    assert pace.allow_tokens(128) == 128 + 16


def test_no_step_has_more_than_vllm_computes() -> None:
    core = Core(step_s=10.0, token_s=1e-6, most_tokens=512)
    assert max(core.step(10_000)[0] for _ in range(40)) == 512
    assert core.pace.allow_tokens(510) == 512


def test_steps_that_compute_nothing_teach_nothing() -> None:
    core = Core(step_s=0.05, token_s=27e-6)
    for _ in range(40):
        core.step(10_000)
    before = core.pace.allow_tokens(0)
    core.step(0)
    assert core.pace.allow_tokens(0) == before
