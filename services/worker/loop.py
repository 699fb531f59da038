"""The engine's loop: commands in, one step, reports out. It blocks while there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from services.worker.engine import (
    CancelAttempt,
    EngineCommand,
    EngineReport,
    Runner,
    Shutdown,
    Snapshot,
    Stepped,
    Submit,
    TakeSnapshot,
)
from services.worker.kv_events import to_kv_events, to_snapshot
from services.worker.scheduler import Outcome, Scheduler
from shared.messages import AllBlocksCleared, KvEvent


class Channel(Protocol):
    """What the loop needs of its end of the channel."""

    def send(self, report: EngineReport) -> None: ...

    def receive(self, *, wait: bool) -> Sequence[EngineCommand]: ...


class EngineLoop:
    """Numbers the steps and the KV event batches. Batch 0 of every engine says that its cache is empty."""

    def __init__(self, channel: Channel, scheduler: Scheduler, runner: Runner, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._progress = 0
        self._event_sequence = -1

    def run(self) -> None:
        """Returns on Shutdown. Whatever the runner raises comes out of here."""
        self._report(Outcome(), [AllBlocksCleared()])
        while self._obey():
            if self._scheduler.busy:
                self._step()

    def _obey(self) -> bool:
        """Takes the commands that have come; False: the last one was Shutdown."""
        for command in self._channel.receive(wait=not self._scheduler.busy):
            match command:
                case Submit():
                    self._scheduler.submit(command, self._clock())
                case CancelAttempt(request, attempt):
                    self._scheduler.cancel(request, attempt)
                case TakeSnapshot(ticket):
                    blocks = to_snapshot(self._scheduler.snapshot())
                    self._channel.send(Snapshot(ticket=ticket, event_sequence=self._event_sequence, blocks=blocks))
                case Shutdown():
                    return False
                case _:
                    assert_never(command)
        return True

    def _step(self) -> None:
        works = self._scheduler.schedule(self._clock())
        begun_s = self._clock()
        drawn = self._runner.step(works) if works else []
        elapsed_s = self._clock() - begun_s
        outcome = self._scheduler.advance(drawn, elapsed_s)
        self._progress += 1
        tokens = sum(len(work.tokens) for work in works)
        events = to_kv_events(outcome.events, self._runner.facts.block_size)
        self._report(outcome, events, tokens=tokens, elapsed_s=elapsed_s)

    def _report(self, outcome: Outcome, events: list[KvEvent], *, tokens: int = 0, elapsed_s: float = 0.0) -> None:
        if events:
            self._event_sequence += 1
        self._channel.send(
            Stepped(
                progress=self._progress,
                parts=outcome.parts,
                events=events,
                event_sequence=self._event_sequence,
                digest=self._scheduler.digest,
                load=self._scheduler.load(),
                tokens=tokens,
                elapsed_s=elapsed_s,
            )
        )
