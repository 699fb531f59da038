"""Steps of workers that share a machine: each goes on in the time that it takes next to those that there are."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.virtual.machine import SimulatedMachine, StepTime
from services.virtual.store import FleetClock
from services.worker.contracts.runner import Work
from shared.messages.generate import Sampling

WORKS = [Work(sequence=0, history=[1], start=0, end=1, blocks=[], sampling=Sampling(max_tokens=1), prompt_tokens=1)]
Begins = list[tuple[float, float]]


def taking(seconds: float) -> StepTime:
    return lambda _: seconds


def took(begins: Begins, workers: int = 2, slower: float = 2.0) -> list[float]:
    """Return the seconds of steps that begin at times and take seconds alone, and `slower` times those next to all."""
    clock, seconds = FleetClock(), dict[int, float]()
    alone = dict(begins)
    machine = SimulatedMachine(clock, workers, lambda _: slower * alone[clock.now_s])
    for number, (begin_s, alone_s) in enumerate(begins):
        clock.at(begin_s, partial(machine.begin, WORKS, taking(alone_s), partial(seconds.__setitem__, number)))
    while len(seconds) < len(begins):
        clock.step()
    return [seconds[number] for number in range(len(begins))]


def test_a_step_alone_takes_its_time_and_steps_at_once_take_longer() -> None:
    assert took([(0, 1), (5, 1)]) == [1, 1]
    assert took([(0, 0), (0.5, 0)]) == [0, 0]
    assert took([(0, 1), (0.5, 10)])[0] == pytest.approx(1.5)  # half of it alone, half of it next to the other
    assert took([(0, 10), (1, 1)]) == pytest.approx([11, 2])
    assert took([(0, 1), (0.25, 1), (5, 1)], workers=3) == pytest.approx([1.375, 1.375, 1])  # one of two others: 1.5


def test_more_steps_than_were_measured_at_once_take_no_longer() -> None:
    assert took([(0, 1), (0.001, 1), (0.002, 1)], workers=2)[1] == pytest.approx(2, abs=0.01)


def test_a_step_without_works_takes_no_time_and_slows_none() -> None:
    clock, seconds = FleetClock(), list[float]()
    machine = SimulatedMachine(clock, 2, lambda _: 9.0)
    machine.begin(WORKS, lambda _: 1.0, seconds.append)
    machine.begin([], lambda _: 1.0, seconds.append)
    clock.step()
    clock.step()
    assert seconds == [0.0, 1.0]


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3)), min_size=1, max_size=8, unique_by=lambda each: each[0]),
    st.integers(1, 4),
    st.floats(0.5, 4),
)
def test_each_step_ends_between_its_times_alone_and_next_to_all(begins: Begins, workers: int, slower: float) -> None:
    for (_, alone_s), seconds in zip(begins, took(begins, workers, slower), strict=True):
        least, most = sorted((alone_s, slower * alone_s))
        assert least - 1e-9 <= seconds <= most + 1e-9
