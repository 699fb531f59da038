"""DiffusersEngine: commands in, one denoising step of one group after another, reports out.

    commands of the shell ──▶ PictureQueue ──▶ PipelineRun.advance: a step in the run's thread
    Stepped ◀── steps, previews, pieces of files ◀── an eventfd wakes the loop when the step has ended

The loop's thread computes nothing, so that it hears commands at once. While a step lasts, or files are written, it says
every BEAT_S that the engine lives, since that may take longer than frontends wait for a sign; a step or a file that
takes `stall_s` ends the engine.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

from services.worker.config import EngineConfig
from services.worker.contracts.messages import (
    BlockExplained,
    CancelAttempt,
    EncodeImage,
    EngineCommand,
    ExplainBlock,
    Failed,
    MemoryUse,
    Operate,
    Operated,
    Prefetch,
    Probed,
    ProbeDevice,
    Ready,
    Shutdown,
    Snapshot,
    Submit,
    TakeEngineSnapshot,
    TakeOver,
)
from services.worker.diffusers.pipeline import Pipeline, PipelineRun
from services.worker.diffusers.queue import PictureQueue
from services.worker.diffusers.trial import trial_picture
from services.worker.engine.channel import EngineEnd
from shared.messages.cards import KvLayout

BLOCK_STEPS = 16
"""The steps that count as a block in a worker's load; there is no cache."""
BEAT_S = 1.0
"""Seconds between two signs of life during a step."""
PIECES_S = 0.005
"""Least seconds between two pieces of files, so that a frontend can read them."""
_MEMORY = 0.1
"""The weight of the latest step in the mean of steps a second."""


@dataclass
class _Step:
    """A step that is being computed."""

    group: int
    """The number of its group. 0 for a probe."""
    run: PipelineRun
    begun_s: float


class DiffusersEngine:
    """Serves the channel with one pipeline."""

    def __init__(self, config: EngineConfig, pipeline: Pipeline, channel: EngineEnd) -> None:
        worker = config.worker
        self._config = worker
        self._pipeline = pipeline
        self._channel = channel
        together = worker.diffusers.most_together or (1 if pipeline.device == "cpu" else worker.max_running)
        self._queue = PictureQueue(most_running=worker.max_running, most_together=together if pipeline.pauses else 1)
        self._runs: dict[int, PipelineRun] = {}
        self._writing: dict[int, tuple[PipelineRun, float]] = {}
        """Runs that write their files, and since when, by their groups."""
        self._beat_s = 0.0
        """When the last sign of life was sent."""
        self._step: _Step | None = None
        self._progress = 0
        self._steps_per_s = 0.0
        self._probes: deque[PipelineRun] = deque()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        channel.watch(self._woken)

    @property
    def facts(self) -> Ready:
        """What the engine serves. A request has as many tokens as steps."""
        output, worker = self._pipeline.output, self._config
        blocks = worker.max_running * -(-output.most_steps // BLOCK_STEPS)
        return Ready(
            context_length=output.most_steps + 1,
            vocab_size=1,
            eos_token_ids=(),
            block_size=BLOCK_STEPS,
            capacity_blocks=blocks,
            kv_layout=KvLayout("float32", 1, 1, 1, BLOCK_STEPS),
            generates=False,
            pictures=output,
            gpus=self._pipeline.gpus(),
        )

    def run(self) -> Failed | None:
        """Serve until Shutdown, or return why the engine fails. Raise ChannelClosed."""
        self._report()
        self._report_memory()
        while True:
            for command in self._channel.receive(self._limit_s()):
                if isinstance(command, Shutdown):
                    return None
                self._handle(command, time.monotonic())
            with suppress(BlockingIOError):
                os.eventfd_read(self._woken)
            now_s = time.monotonic()
            self._queue.expire(now_s)
            if self._step is not None and now_s - self._step.begun_s >= self._config.stall_s:
                return Failed(reason=f"a step took longer than worker.stall_s, {self._config.stall_s:g} s")
            if any(now_s - begun_s >= self._config.stall_s for _, begun_s in self._writing.values()):
                return Failed(reason=f"a file took longer than worker.stall_s, {self._config.stall_s:g} s")
            self._beat(now_s)
            self._end_step(now_s)
            self._take_files(now_s)
            self._begin_step(now_s)
            if self._queue.sends:
                self._queue.send_piece()
            self._report()

    def _limit_s(self) -> float | None:
        """Return how long to wait for a command, or for the end of the step."""
        if self._queue.sends:
            return PIECES_S
        if self._step is not None:
            return BEAT_S if not self._step.run.resting else 0.0
        if self._writing:
            return BEAT_S
        due_s = self._queue.due_s()
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def _handle(self, command: EngineCommand, now_s: float) -> None:
        match command:
            case Submit():
                self._queue.add(command, now_s)
            case CancelAttempt():
                self._queue.cancel((command.request, command.attempt))
            case TakeEngineSnapshot(ticket):
                self._channel.send(Snapshot(ticket, -1, []))
            case ExplainBlock(ticket):
                self._channel.send(BlockExplained(ticket, [], []))
            case Operate(ticket, operation):
                self._channel.send(Operated(ticket, failed=f"{operation}: this engine cannot do it"))
            case ProbeDevice():
                self._probes.append(self._probe())
            case Prefetch() | EncodeImage() | TakeOver() | Shutdown():
                pass  # there are no blocks, no roles, no standby, and `run` sees the end
            case _:
                assert_never(command)

    def _begin_step(self, now_s: float) -> None:
        """Begin the next step, unless one is being computed."""
        if self._step is not None:
            return
        self._drop_unwanted()  # before groups begin in their place: nothing else would wake the loop to begin them
        while (taken := self._queue.take_group(now_s)) is not None:
            group, pictures = taken
            self._runs[group] = self._pipeline.run(pictures, self._wake)
        if self._probes:
            chosen, run = 0, self._probes[0]
        else:
            group_or_none = self._queue.next_turn()
            if group_or_none is None:
                return
            chosen, run = group_or_none, self._runs[group_or_none]
        run.advance()
        self._step = _Step(chosen, run, now_s)

    def _drop_unwanted(self) -> None:
        """Drop the groups of which no picture is wanted any longer. Their runs rest."""
        for group in [group for group in self._runs if not self._queue.is_wanted(group)]:
            self._runs.pop(group).stop()
            self._queue.drop(group)

    def _beat(self, now_s: float) -> None:
        """Say that the engine lives, if it works and has not said so lately."""
        if (self._step is not None or self._writing) and now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._progress += 1
            self._report(always=True)

    def _end_step(self, now_s: float) -> None:
        """Take up a step that has ended."""
        step = self._step
        if step is None or not step.run.resting:
            return
        self._step = None
        took_s = now_s - step.begun_s
        if not step.group:
            self._end_probe(step.run, took_s)
            return
        self._progress += 1
        count = len(step.run.previews)
        if step.run.computed or step.run.failed:
            self._writing[step.group] = self._runs.pop(step.group), now_s
            self._queue.leave_turn(step.group)
            self._report_memory()
        else:
            self._queue.record_step(step.group, step.run.step, step.run.previews)
            speed = count / max(took_s, 1e-6)
            self._steps_per_s += (speed - self._steps_per_s) * (_MEMORY if self._steps_per_s else 1.0)
        self._report(always=True, steps=1, tokens=count, took_s=took_s)

    def _take_files(self, now_s: float) -> None:
        """Take up the files that were written, and the runs that failed."""
        for group in [group for group, (run, _) in self._writing.items() if run.ended]:
            run, _ = self._writing.pop(group)
            if run.files is not None:
                self._queue.finish(group, run.files, now_s)
            else:
                self._pipeline.free_memory()
                self._queue.fail(group, run.failed)

    def _end_probe(self, run: PipelineRun, took_s: float) -> None:
        """A probe is the first steps of a small picture; what comes after them is computed too."""
        if run.computed or run.failed:
            self._probes.popleft()
            self._channel.send(Probed(took_s, run.failed))

    def _probe(self) -> PipelineRun:
        """Return a run of the smallest picture of one step that the pipeline makes."""
        way = next(iter(self._pipeline.ways))
        return self._pipeline.run([trial_picture(way, self._pipeline.output)], self._wake)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _report(self, *, always: bool = False, steps: int = 0, tokens: int = 0, took_s: float = 0.0) -> None:
        """Report what is new, or that the engine lives."""
        outcome = self._queue.take_outcome()
        if not (always or outcome.parts or not self._progress):
            return
        load = self._queue.load(block_size=BLOCK_STEPS, steps_per_s=self._steps_per_s)
        if outcome.parts and not steps:
            self._progress += 1
        stepped = outcome.to_stepped(
            [],
            progress=self._progress,
            event_sequence=-1,
            digest=0,
            load=load,
            steps=steps,
            tokens=tokens,
            elapsed_s=took_s,
        )
        self._channel.send(stepped)

    def _report_memory(self) -> None:
        memory = self._pipeline.memory()
        if memory is not None:
            self._channel.send(MemoryUse(*memory))
