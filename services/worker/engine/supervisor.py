"""EngineSupervisor: keeps one engine going. It starts the engine, follows its reports, and starts it again.

                 Ready
    starting ──────────▶ serving          `epoch` counts the starts; `facts` are there while it serves
       ▲                    │
       │ after a back-off   │ Failed, the process died, or it stood still and was killed
       └────── lost ◀───────┘ (reported once; from starting too)

If an engine stands by (worker/engine/standby.py), it takes over at once, in place of the back-off and the start.

An engine that says that the model cannot be served is not started again: `run` raises ModelError. Where an earlier
engine has served the model, another is started: the cause, such as a GPU that is lost or taken, may pass.

An engine may be stopped: it ends, and none is started until one is wanted again. That is no loss.

An engine that is stuck is killed: if it reports nothing while requests wait, if it was idle and does not compute a
probe, and if it does not compute its first tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import assert_never

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import (
    FIRST_TOKENS,
    FIRST_TOKENS_LIMIT_S,
    BlockExplained,
    CancelAttempt,
    EncodeImage,
    EngineOperation,
    EngineReport,
    ExplainBlock,
    Failed,
    ImageEncoded,
    KvbmAsks,
    KvbmLink,
    Loading,
    MemoryUse,
    Operate,
    Operated,
    OwnMetrics,
    Prefetch,
    Probed,
    ProbeDevice,
    Ready,
    Snapshot,
    StandingBy,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.engine.back_off import STABLE_AFTER_S, BackOff
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.contract import Engine
from services.worker.engine.standby import AFTER_S, Standby, started
from shared.errors import ModelError, ProtocolError, Unavailable
from shared.messages.encode import Encode
from shared.messages.load import LOSS_LIMIT_CHARACTERS, EngineLosses

END_LIMIT_S = 2.0
"""Seconds that an engine has to end after Shutdown."""
GRACE_S = 30.0
"""Seconds after FIRST_TOKENS_LIMIT_S in which an engine can say itself why it could not compute them."""

TAKE_OVER_LIMIT_S = 10.0
"""Seconds in which a standby that was ready must be an engine. Afterwards it is killed, and another engine starts."""

StartEngine = Callable[[WorkerConfig, str, str], Awaitable[Engine]]
"""Starts an engine from the settings, the model's name and the worker's instance id. The engine reports Loading and
Ready by itself."""

_Asked = TakeEngineSnapshot | ExplainBlock | Operate | EncodeImage
_Answer = Snapshot | BlockExplained | Operated | ImageEncoded

_log = logging.getLogger(__name__)


class _Gate:
    """Whether engines are started, and what became of the last ones."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        """Set unless the engine was stopped."""
        self.wanted.set()
        self.hurry = asyncio.Event()
        """Set if the next engine is wanted now, whatever the back-off says."""
        self.ended = asyncio.Event()
        """Set while there is no engine."""
        self.ended.set()
        self.lost: tuple[int, str, float] = 0, "", 0.0
        """How many engines were lost, why the last one, and when, on the loop's clock. Those that were stopped are not
        counted."""
        self.stopped = False
        """Whether the engine that lives ends because it was stopped."""
        self.ready_s: float | None = None
        """When the engine that lives was ready. None before."""
        self.lost_in_a_row = 0
        """Engines that were lost in a row, each before it had served for STABLE_AFTER_S."""


class EngineSupervisor:
    """Runs one engine at a time. The callbacks run in the task of `run`, one after another. An engine that stands by is
    the next one, also at the beginning; while an engine serves, one is kept if the settings say so."""

    encoding = 0
    """Number of images that wait until they are encoded for other workers."""
    _stage_limit: asyncio.TimerHandle | None = None
    """Kills the engine whose start has not come further in time. None before the first one."""

    def __init__(
        self,
        config: WorkerConfig,
        model_name: str,
        instance: str,
        start: StartEngine,
        *,
        loading: Callable[[Loading], None],
        ready: Callable[[Ready], None],
        stepped: Callable[[Stepped], None],
        lost: Callable[[str], None],
        busy: Callable[[], bool],
        kvbm: Callable[[KvbmAsks | KvbmLink], None],
        observed: Callable[[Probed | MemoryUse | OwnMetrics], None],
        standby: Standby | None = None,
    ) -> None:
        """`busy` says whether attempts wait for the engine; `kvbm` gets what it says of its exchange with
        the kvbm, `observed` what it says of its health and of its own metrics. The caller ends `standby`."""
        self._config = config
        self._instance = instance
        self._start = partial(start, config, model_name, instance)
        self._loading = loading
        self._ready = ready
        self._stepped = stepped
        self._lost = lost
        self._busy = busy
        self._kvbm = kvbm
        self._observed = observed
        self.standby = standby
        self._back_off = BackOff()
        self._delay_s = 0.0
        """The back-off after the latest loss of an engine, after which a standby is started, too."""
        self._gate = _Gate()
        self.take_overs = 0
        """How often a standby has taken over from an engine that was lost."""
        self._reports = 0
        """Number of reports of all engines so far."""
        self._engine: Engine | None = None
        self._served = False
        """Whether any engine was ready once."""
        self._tickets = 0
        self._answers: dict[int, asyncio.Future[_Answer]] = {}
        self._operating = 0
        """Number of operations that wait for their answer."""
        self._asleep = False
        """Whether an operation has sent the engine to sleep."""
        self._active_s = 0.0
        """When the engine last reported a step, or that it is ready, or was found to be at work."""
        self._probe: asyncio.Future[None] | None = None
        """Done when the engine has computed the probe that it was asked for. None if it was not."""
        self._probe_begun_s = 0.0
        """When it was asked for it."""
        self._killed = ""
        """Why the engine was killed. Empty if it was not."""
        self.facts: Ready | None = None
        self.epoch = 1
        self._begun_s = 0.0
        """When the engine was started, on the loop's clock."""
        self.start_s = 0.0
        """Seconds from there until it was ready."""

    @property
    def pid(self) -> int | None:
        """Id of the engine's process; None if there is none."""
        return None if self._engine is None else self._engine.pid

    @property
    def losses(self) -> EngineLosses | None:
        """The engines that were lost. None if none was."""
        count, reason, at_s = self._gate.lost
        if not count:
            return None
        age_s = asyncio.get_running_loop().time() - at_s
        return EngineLosses(count, age_s, reason[:LOSS_LIMIT_CHARACTERS], self.take_overs)

    @property
    def lost_in_a_row(self) -> int:
        """Engines that were lost in a row, each before it had served for STABLE_AFTER_S. 0 after one that was
        stopped."""
        return self._gate.lost_in_a_row

    async def run(self) -> None:
        """Keep an engine going until cancelled; it has ended when this returns. Raise ModelError."""
        while True:
            await self._gate.wanted.wait()
            failed = await self._live()
            if self._hopeless(failed):
                raise ModelError(failed.reason)
            if not self._gate.stopped and (self.standby is None or self.standby.pid is None):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._delay_s):
                        await self._gate.hurry.wait()

    def _hopeless(self, failed: Failed) -> bool:
        """Whether no engine has served the model, and this one says that none can."""
        return failed.model and not self._served

    def _report_loss(self, failed: Failed) -> None:
        """Count an engine that is lost, or was stopped, and report it."""
        now_s = asyncio.get_running_loop().time()
        self.epoch += 1
        if self._gate.stopped:
            self._gate.lost_in_a_row = 0
        else:
            self._gate.lost = self._gate.lost[0] + 1, failed.reason, now_s
            lived_s = 0.0 if self._gate.ready_s is None else now_s - self._gate.ready_s
            self._gate.lost_in_a_row = 1 if lived_s >= STABLE_AFTER_S else self._gate.lost_in_a_row + 1
            self._delay_s = self._back_off.after(now_s - self._begun_s)
            pid = None if self.standby is None else self.standby.pid
            if pid is None:
                _log.error("the engine is lost (%s); starting another in %g s", failed.reason, self._delay_s)
            else:
                _log.error("the engine is lost (%s); the standby, process %d, takes over", failed.reason, pid)
        self._lost(failed.reason)

    def submit(self, submit: Submit | Prefetch) -> bool:
        """Send an attempt, or advice. Return False if there is no engine, or if it does not read."""
        return self.facts is not None and self._engine is not None and self._engine.submit(submit)

    def cancel(self, request: str, attempt: int) -> None:
        if self._engine is not None:
            self._engine.send(CancelAttempt(request, attempt))

    async def snapshot(self, limit_s: float, rank: int = 0) -> Snapshot:
        """Return a snapshot of a rank's cache. Raise Unavailable without an engine, or if it does not answer in
        time, and ProtocolError for a rank that the engine does not have."""
        if self.facts is None:
            raise Unavailable("the engine is starting")
        if not 0 <= rank < self.facts.ranks:
            raise ProtocolError(f"a snapshot of rank {rank}: the ranks are 0 to {self.facts.ranks - 1}")
        taken = await self._ask("snapshot", lambda ticket: TakeEngineSnapshot(ticket, rank), limit_s)
        assert isinstance(taken, Snapshot)
        return taken

    async def explain_block(self, name: bytes, limit_s: float, rank: int = 0) -> BlockExplained:
        """Return what a rank knows of a block, by the end of its key. Raise Unavailable without an engine, or if it
        does not answer in time."""
        explained = await self._ask("explain block", lambda ticket: ExplainBlock(ticket, name, rank), limit_s)
        assert isinstance(explained, BlockExplained)
        return explained

    async def encode(self, wanted: Encode) -> str:
        """Have the engine store an image's embeddings in the kvbm; return why they are not there, or nothing. Raise
        Unavailable without an engine, or if it does not answer in time."""
        self.encoding += 1
        try:
            of = (wanted.key, wanted.pixels, wanted.time_left_s, wanted.width, wanted.height)
            encoded = await self._ask("encode", lambda ticket: EncodeImage(ticket, *of), wanted.time_left_s)
        finally:
            self.encoding -= 1
        assert isinstance(encoded, ImageEncoded)
        return encoded.failed

    async def _ask(self, what: str, order: Callable[[int], _Asked], limit_s: float) -> _Answer:
        """Send the order with a new ticket, and return its answer. Raise Unavailable."""
        if self._engine is None or self.facts is None:
            raise Unavailable("the engine is starting")
        self._tickets += 1
        ticket = self._tickets
        self._answers[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._engine.send(order(ticket))
            async with asyncio.timeout(limit_s):
                return await self._answers[ticket]
        except TimeoutError:
            raise Unavailable(f"{what}: the engine did not answer in {limit_s:g} s") from None
        finally:
            del self._answers[ticket]

    async def operate(
        self, operation: EngineOperation, limit_s: float, *, name: str = "", path: str = "", level: int = 1
    ) -> str:
        """Have the engine do an operation; return why it was not done, or nothing. Raise Unavailable without an engine,
        or if it does not answer in time: then it may still do it."""
        if self.facts is None:
            raise Unavailable("the engine is starting")
        if operation not in self.facts.operations:
            return f"{operation}: this engine cannot do it"
        self._operating += 1
        try:
            order = partial(Operate, operation=operation, name=name, path=path, level=level)
            operated = await self._ask(operation, order, limit_s)
        finally:
            self._operating -= 1
        assert isinstance(operated, Operated)
        if operation in ("sleep", "wake") and not operated.failed:
            self._asleep = operation == "sleep"
            if self.standby is not None:
                if self._asleep:
                    await self.standby.end()  # a worker sleeps to free memory
                elif self._config.standby:
                    self.standby.keep()
        return operated.failed

    def kill(self, reason: str = "") -> None:
        """Kill the engine, if there is one; afterwards everything goes as after any engine's death. It is lost for this
        reason."""
        if self._engine is not None:
            self._killed = reason
            self._engine.kill()

    async def stop(self) -> None:
        """Kill the engine, if there is one, and start no other before `start`. Its memory is free afterwards, unless
        the kernel takes longer than END_LIMIT_S."""
        self._gate.wanted.clear()
        self._stop_engine()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await self._gate.ended.wait()

    def _stop_engine(self) -> None:
        if self._engine is not None:
            self._gate.stopped = True
            self.kill("it was stopped")

    def start(self) -> None:
        """Start an engine after a stop, at once."""
        self._gate.wanted.set()
        self._gate.hurry.set()

    async def _live(self) -> Failed:
        """Run one engine until it ends; return why. Its loss is reported before its process has ended: a GPU's driver
        takes a while to free what it held, and attempts go on elsewhere meanwhile."""
        failed: Failed | None = None
        self._begun_s = asyncio.get_running_loop().time()
        taken = None if self.standby is None else self.standby.take(self._instance)
        if taken is None:
            engine, heard = await started(self._start()), None
        else:
            engine, heard = taken
            self.take_overs += self._served
        self._engine, self._asleep, self._killed, self._gate.ready_s = engine, False, "", None
        self._gate.stopped = False
        self._gate.ended.clear()
        self._gate.hurry.clear()
        if not self._gate.wanted.is_set():  # it was stopped while its process was made
            self._stop_engine()
        _log.info("engine %d started, process %d", self.epoch, engine.pid)
        watches = [
            asyncio.ensure_future(watch) for watch in (self._kill_if_stalled(engine), self._probe_if_idle(engine))
        ]
        try:
            failed = await self._follow(engine, heard)
            if self._probe is not None and not self._probe.done():
                self._observed(Probed(asyncio.get_running_loop().time() - self._probe_begun_s, failed.reason))
            return failed
        finally:
            for watch in watches:
                watch.cancel()
            self._probe = None
            # An engine that is still loading does not hear a Shutdown.
            limit_s = 0.0 if self.facts is None else END_LIMIT_S
            self._engine, self.facts = None, None
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(Unavailable("the engine is lost"))
            if failed is not None and not self._hopeless(failed):
                self._report_loss(failed)
            await self._end(engine, limit_s)
            self._gate.ended.set()

    async def _end(self, engine: Engine, limit_s: float) -> None:
        """End an engine, also if this is cancelled meanwhile."""
        ending = asyncio.ensure_future(engine.end(limit_s, self._take_last))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    def _take_last(self, report: EngineReport) -> None:
        """Take what an engine that ends says of its requests to the kvbm; the rest is of no use any longer."""
        if isinstance(report, KvbmAsks):
            self._kvbm(report)

    async def _follow(self, engine: Engine, heard: Loading | StandingBy | None) -> Failed:
        """Take the reports of an engine until it ends; return why. `heard` is what it has reported last as a
        standby."""
        if heard is not None:
            self._take_early(engine, heard)
        while True:
            try:
                report = await engine.receive()
            except (ChannelClosed, ProtocolError) as wrong:
                return Failed(reason=self._killed or str(wrong))
            self._reports += 1
            match report:
                case Loading() | StandingBy() | Ready():
                    self._take_early(engine, report)
                case Stepped():
                    self._active_s = asyncio.get_running_loop().time()
                    self._stepped(report)
                case Snapshot(ticket) | BlockExplained(ticket) | Operated(ticket) | ImageEncoded(ticket):
                    waiting = self._answers.get(ticket)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(report)
                case KvbmAsks() | KvbmLink():
                    self._kvbm(report)
                case Probed() | MemoryUse() | OwnMetrics():
                    self._observed(report)
                    if isinstance(report, Probed) and self._probe is not None and not self._probe.done():
                        self._probe.set_result(None)
                case Failed():
                    return report
                case _:
                    assert_never(report)

    def _take_early(self, engine: Engine, report: Loading | StandingBy | Ready) -> None:
        """Take a report of a start: each stage that has a limit is killed at it."""
        loop = asyncio.get_running_loop()
        match report:
            case Loading():
                self._loading(report)
                if report.what == FIRST_TOKENS:
                    late = f"the engine did not compute its first tokens in {FIRST_TOKENS_LIMIT_S:g} s"
                    self._limit_stage(engine, FIRST_TOKENS_LIMIT_S + GRACE_S, late)
            case StandingBy():
                late = f"the standby did not take over in {TAKE_OVER_LIMIT_S:g} s"
                self._limit_stage(engine, TAKE_OVER_LIMIT_S, late)
            case Ready():
                self.facts = report
                self._served = True
                self._active_s = self._gate.ready_s = loop.time()
                self.start_s = self._active_s - self._begun_s
                self._ready(report)
                if self.standby is not None and self._config.standby:
                    self.standby.keep(max(AFTER_S, self._delay_s))
            case _:
                assert_never(report)

    async def _kill_if_stalled(self, engine: Engine) -> None:
        """Kill the engine where attempts waited at two checks in a row and it reported nothing between them. Loading
        may take any time, and an operation the time of its own limit. Afterwards everything goes as after any engine's
        death."""
        waited_at: int | None = None
        while True:
            await asyncio.sleep(self._config.stall_s / 2)
            waits = self.facts is not None and (self._busy() or self.encoding > 0) and not self._operating
            if waits and waited_at == self._reports:
                quiet_s = self._config.stall_s / 2
                self._kill(engine, f"the engine reported nothing for {quiet_s:g} s while requests wait")
                return
            waited_at = self._reports if waits else None

    async def _probe_if_idle(self, engine: Engine) -> None:
        """Have a native or a diffusers engine compute a probe whenever it was idle for `health.idle_s`, and kill it if
        it is late: a device that is lost or hangs looks like one that has nothing to do. Engines without a device need
        none; vLLM and attached engines do it by themselves."""
        health, loop = self._config.health, asyncio.get_running_loop()
        if not health.idle_s or self._config.engine not in ("native", "diffusers"):
            return
        while True:
            await asyncio.sleep(max(0.0, self._active_s + health.idle_s - loop.time()))
            if loop.time() < self._active_s + health.idle_s:
                continue
            self._active_s = self._probe_begun_s = loop.time()
            if self.facts is None or self._busy() or self._operating or self._asleep:
                continue
            self._probe = loop.create_future()
            engine.send(ProbeDevice(health.prompt))
            try:
                async with asyncio.timeout(health.limit_s):
                    await self._probe
            except TimeoutError:
                late = f"the idle engine did not compute a token in {health.limit_s:g} s"
                self._observed(Probed(health.limit_s, late))
                self._kill(engine, late)
                return
            self._probe = None

    def _limit_stage(self, engine: Engine, limit_s: float, late: str) -> None:
        """Kill the engine for this reason if it is not ready, and says of no other stage that it begins, in time."""
        if self._stage_limit is not None:
            self._stage_limit.cancel()
        loop = asyncio.get_running_loop()
        self._stage_limit = loop.call_later(limit_s, self._kill_if_not_ready, engine, late)

    def _kill_if_not_ready(self, engine: Engine, reason: str) -> None:
        if self._engine is engine and self.facts is None:
            self._kill(engine, reason)

    def _kill(self, engine: Engine, reason: str) -> None:
        """Kill an engine that is stuck; it is lost for this reason."""
        _log.error("%s: it is killed", reason)
        self._killed = reason
        engine.kill()
