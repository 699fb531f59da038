from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.worker.core import EngineCore
from services.worker.engine import (
    CancelAttempt,
    Drawn,
    EngineCommand,
    EngineReport,
    Shutdown,
    Snapshot,
    Stepped,
    Submit,
    TakeSnapshot,
    Work,
)
from services.worker.loop import EngineLoop
from services.worker.scheduler import Limits, Scheduler
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages import AllBlocksCleared, BlockStored, Sampling
from tests.worker.fake_runner import FakeRunner, continuation

PROMPT = [1, 2, 3, 4, 1]


def submit(request: str) -> Submit:
    return Submit(
        request=request,
        attempt=1,
        frontend="f",
        tokens=pack_tokens(PROMPT),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(max_tokens=4, ignore_eos=True),
        time_left_s=60.0,
    )


class Script:
    """A channel that says what the script says: one line each time the loop asks, then Shutdown once it is idle."""

    def __init__(self, *lines: Sequence[EngineCommand]) -> None:
        self._lines = list(lines)
        self.reports: list[EngineReport] = []

    def send(self, report: EngineReport) -> None:
        self.reports.append(report)

    def receive(self, limit_s: float | None) -> Sequence[EngineCommand]:
        if self._lines:
            return self._lines.pop(0)
        return [Shutdown()] if limit_s is None else []

    @property
    def steps(self) -> list[Stepped]:
        return [report for report in self.reports if isinstance(report, Stepped)]


def run(*lines: Sequence[EngineCommand], runner: FakeRunner | None = None) -> Script:
    runner = runner or FakeRunner(block_size=2, capacity_blocks=16, context_length=32)
    scheduler = Scheduler(
        Limits(
            model="model",
            context_length=32,
            eos_token_ids=frozenset((0,)),
            block_size=2,
            capacity_blocks=16,
        )
    )
    script = Script(*lines)
    ticks = iter(range(1_000_000))
    EngineLoop(script, EngineCore(scheduler, 2), runner, lambda: next(ticks) / 1000).run()
    return script


def test_an_attempt_is_drawn_to_its_end_and_reported_step_by_step() -> None:
    script = run([submit("r")])
    tokens = [
        token for step in script.steps for part in step.parts.get("f", []) for token in unpack_tokens(part.tokens)
    ]
    assert tokens[:1] == continuation(PROMPT, 1, 32)
    assert len(tokens) == 4
    assert [step.progress for step in script.steps] == list(range(len(script.steps)))
    assert script.steps[-1].load.running == 0


def test_the_first_batch_says_that_the_cache_is_empty_and_batches_are_numbered_without_gaps() -> None:
    script = run([submit("r")])
    assert script.steps[0].events == [AllBlocksCleared()]
    sequences = [step.event_sequence for step in script.steps if step.events]
    assert sequences == list(range(len(sequences)))
    assert all(step.event_sequence >= 0 for step in script.steps)


def test_a_snapshot_stands_at_the_sequence_it_names() -> None:
    script = run([submit("r")], [], [TakeSnapshot(7)])
    at = next(index for index, report in enumerate(script.reports) if isinstance(report, Snapshot))
    taken = script.reports[at]
    assert isinstance(taken, Snapshot)
    assert taken.ticket == 7
    told = [step for step in script.reports[:at] if isinstance(step, Stepped)]
    stored = [
        block
        for step in told
        for event in step.events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
    ]
    assert [block.hash for block in taken.blocks] == stored
    assert taken.event_sequence == told[-1].event_sequence


def test_a_cancelled_attempt_is_told_even_where_nothing_is_computed() -> None:
    script = run([submit("r"), CancelAttempt("r", 1)])
    (part,) = [part for step in script.steps for part in step.parts.get("f", [])]
    assert part.finish == "cancelled"


class BrokenRunner(FakeRunner):
    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        raise ZeroDivisionError("the device is gone")


def test_what_the_runner_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        run([submit("r")], runner=BrokenRunner(block_size=2, capacity_blocks=16, context_length=32))
