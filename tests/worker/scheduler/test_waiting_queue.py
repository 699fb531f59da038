from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.worker.contracts.messages import Submit
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.sequence import Sequence
from services.worker.scheduler.waiting_queue import WaitingQueue
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling
from tests.worker.manual_engine import Engine

PROMPT = [1, 2, 3, 4, 1, 2]
LIMITS = SchedulerLimits(
    model="model", context_length=64, eos_token_ids=frozenset(), block_size=2, capacity_blocks=16, max_waiting=512
)


def sequence(arrival: int, *, tokens: int = 4, priority: int = 0) -> Sequence:
    submit = Submit(f"r{arrival}", 1, "f", pack_tokens([5] * tokens), tokens, Sampling(8), 60.0, priority=priority)
    return Sequence.of(submit, LIMITS, arrival, float(arrival))


def test_an_empty_queue_takes_a_prompt_of_any_length_and_a_full_one_says_what_fills_it() -> None:
    queue = WaitingQueue(most_sequences=2, most_tokens=10)
    assert queue.refusal(64) == ""
    queue.add(sequence(0, tokens=6), 0.0)
    assert queue.refusal(4) == ""
    assert queue.refusal(5) == "overloaded: 6 tokens wait"
    queue.add(sequence(1), 0.0)
    assert queue.refusal(0) == "overloaded: 2 attempts wait"


def test_a_full_queue_refuses_by_count_and_by_tokens() -> None:
    engine = Engine(max_running=1, max_waiting=2)
    for name in ("a", "b", "c"):
        engine.submit(name, PROMPT)
    engine.step()
    assert "2 attempts wait" in engine.last("c").error
    engine = Engine(max_running=1, max_waiting_tokens=10)
    engine.submit("a", PROMPT)
    engine.submit("b", PROMPT)
    engine.step()
    assert "tokens wait" in engine.last("b").error


def test_a_sequence_waited_for_what_held_up_the_head_of_the_queue_since_it_was_added() -> None:
    queue, late = WaitingQueue(most_sequences=2, most_tokens=10), sequence(1)
    queue.add(sequence(0), 0.0)
    queue.set_cause("blocks", 1.0)
    queue.add(late, 3.0)
    queue.set_cause("places", 4.0)
    queue.set_cause(None, 6.0)
    assert queue.waited_s(late, 7.0) == pytest.approx((1.0, 2.0, 0.0))
    assert late.queued_s == 3.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans())))
def test_the_order_is_by_priority_and_then_by_arrival_whatever_leaves(arrivals: list[tuple[int, int, bool]]) -> None:
    queue, stay = WaitingQueue(most_sequences=64, most_tokens=1000), list[Sequence]()
    for arrival, (priority, tokens, leaves) in enumerate(arrivals):
        one = sequence(arrival, tokens=tokens, priority=priority)
        queue.add(one, float(arrival))
        queue.validate()
        if leaves:
            queue.remove(one)
            queue.validate()
        else:
            stay.append(one)
    assert queue.sequences == sorted(stay, key=lambda one: (-one.submit.priority, one.arrival))
