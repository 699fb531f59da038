"""Operator: carries out what the operations of a worker decide.

NATS operate ──▶ Operations ──▶ AwaitIdle  ─▶ Attempts, and hands back those that take more than `drain_s`
     ◀── answer      ▲          ReadLora   ─▶ the files of a LoRA, in a thread
                     │          AskEngine  ─▶ EngineSupervisor, and kills an engine that does not answer
                     └────────── what became of it
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import assert_never

import msgspec

from services.worker.contracts.messages import KvbmLink, Ready
from services.worker.engine.supervisor import EngineSupervisor
from services.worker.model.card import CardAnnouncement
from services.worker.model.lora_files import check_files, digest_lora
from services.worker.operations.operations import (
    AnnounceState,
    AnswerOperation,
    AskEngine,
    AwaitIdle,
    NoteFault,
    OperationAction,
    Operations,
    ReadLora,
    StartEngine,
    StopEngine,
)
from services.worker.requests.attempts import Attempts, Name
from shared.bus.contract import Message
from shared.errors import ModelError, ProtocolError, Unavailable
from shared.lora import make_lora_id, name_of_lora
from shared.messages.cards import ASLEEP, ModelCard, TurnTaker
from shared.messages.frames import SHUTTING_DOWN
from shared.messages.people import OPERATE_WORKER, WORKER_OPERATED, WorkerOperated, WorkerOperation
from shared.runtime.runtime import Runtime

ENGINE_LIMIT_S = 300.0
"""Seconds that an engine has for one operation; it is killed after that, as it may be in any state."""
HAND_BACK_LIMIT_S = 30.0
"""Seconds that an engine has to end attempts that were handed back."""
PUBLISH_LIMIT_S = 10.0
"""Seconds for which an answer waits until discovery has the card, so that routers can know what it says."""
NOT_PUBLISHED = (
    f"it is done, but discovery has not taken the worker's card within {PUBLISH_LIMIT_S:g} s: routers learn of it when"
    " discovery answers"
)

_log = logging.getLogger(__name__)


class Operator:
    """Runs one operation at a time. All methods run in the loop's thread."""

    def __init__(
        self,
        runtime: Runtime,
        model_name: str,
        engine: EngineSupervisor,
        attempts: Attempts,
        attempts_changed: asyncio.Event,
        announcement: CardAnnouncement,
        *,
        turns: str,
        drain_s: float,
        lora_bytes: int,
        link: Callable[[], KvbmLink],
        hand_back: Callable[[list[Name]], None],
        answer: Callable[[Message, bytes], Awaitable[object]],
    ) -> None:
        """`turns` names the device on which the model takes turns; empty if it serves all the time.
        `lora_bytes` is the most that a LoRA may take as float32, or 0 if the engine decides it;
        `attempts_changed` is set at each end of an attempt; `link` returns the link to a kvbm for the card;
        `hand_back` gives attempts back to their frontends; `answer` answers a message."""
        self._instance = runtime.instance
        self._health = runtime.health
        self._turns = turns
        self._operations = Operations(model_name, by_turns=bool(turns))
        self._engine = engine
        self._attempts = attempts
        self._attempts_changed = attempts_changed
        self._announcement = announcement
        self._drain_s = drain_s
        self._lora_bytes = lora_bytes
        self._link = link
        self._hand_back = hand_back
        self._answer = answer
        self._card: ModelCard | None = None
        """The card of the engine that lives, without what changes; None without one."""
        self._asked: tuple[Message, WorkerOperation] | None = None
        """The message whose operation is not answered yet."""
        self.asleep = asyncio.Event()
        """Set when the worker has fallen asleep because it was asked to, and has said so."""
        self._started = asyncio.Event()
        """Set once an engine is ready or lost that was started because the worker was woken."""
        self._actions: asyncio.Queue[OperationAction] = asyncio.Queue()
        """What waits for `run`: bounded by the operations, which wait for each of the long ones."""

    def engine_ready(self, facts: Ready, card: ModelCard) -> None:
        """An engine has started. Its card, to which LoRAs and link are added, is published when the engine has all that
        the worker is to serve."""
        self._card = card
        self._put(self._operations.engine_ready(facts))
        self._started.set()

    def engine_lost(self, reason: str) -> None:
        """The engine has ended: withdraw the card."""
        self._card = None
        self._put(self._operations.engine_lost(reason, self._engine.lost_in_a_row))
        if self._engine.lost_in_a_row:  # else it was stopped, and another one is to start
            self._started.set()
        self.announce()

    @property
    def note(self) -> str:
        """Why the worker has no engine, for people. Empty if it has one, or one is starting."""
        why = self._operations.stopped
        return f"its engine is stopped, and starts when a request wakes the model: {why}" if why else ""

    def announce(self) -> None:
        """Publish the card while the worker serves, and the state of the worker."""
        operations = self._operations
        self._attempts.loras = operations.shown_loras
        self._attempts.closed = operations.shown_state and f"this worker is {operations.shown_state}"
        own = self._card
        if own is not None:
            link = self._link()
            own = msgspec.structs.replace(own, lora=operations.shown_loras, kvbm=link.kvbm, kvbm_layout=link.layout)
            if self._turns:
                waking = msgspec.structs.replace(own, lora=operations.known_loras)  # level 2 unloads them
                self._announcement.turn = TurnTaker(self._turns, waking)
        card = own if operations.serves and not self._attempts.draining else None
        if card is not None:
            if self._announcement.card is None:
                self._health.unready("registering")
        elif operations.shown_state and not (
            self._attempts.draining or (self._turns and operations.shown_state == ASLEEP)
        ):
            self._health.unready(self._attempts.closed)
        self._announcement.show(card, operations.shown_state)

    async def receive(self, message: Message) -> None:
        """Begin an operation, or refuse it. Raise ProtocolError for a message that has no subject for the answer."""
        if not message.reply:
            raise ProtocolError("no reply subject")
        try:
            asked = OPERATE_WORKER.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            await self._tell(message, str(wrong))
            return
        unanswered = None if self._asked is None else self._asked[1]
        ends = self._attempts.draining
        refused = SHUTTING_DOWN if ends else self._operations.refusal(asked, unanswered)
        if refused:
            await self._tell(message, refused, busy=ends or unanswered is not None or self._operations.is_busy)
            return
        _log.info("%s", f"{asked.operation} {asked.name}" if asked.operation.endswith("_lora") else asked.operation)
        self._asked = message, asked.operation
        self._put(self._operations.begin(asked))

    async def run(self) -> None:
        """Carry out actions until cancelled."""
        try:
            while True:
                await self._carry_out(await self._actions.get())
        finally:
            if self._asked is not None:
                await self._tell(self._asked[0], SHUTTING_DOWN)

    def _put(self, actions: list[OperationAction]) -> None:
        for action in actions:
            self._actions.put_nowait(action)

    async def _carry_out(self, action: OperationAction) -> None:
        match action:
            case AnnounceState():
                self.announce()
            case AwaitIdle(lora, within_s):
                limit_s = self._drain_s if within_s is None else within_s
                self._put(self._operations.on_idle(await self._await_idle(lora, limit_s)))
            case ReadLora(path):
                try:
                    await asyncio.to_thread(check_files, Path(path), self._lora_bytes)
                    self._put(self._operations.on_lora_read(await _digest(path)))
                except ModelError as wrong:
                    self._put(self._operations.on_lora_read("", str(wrong)))
            case AskEngine():
                self._put(await self._ask_engine(action))
            case StopEngine():
                await self._engine.stop()
            case StartEngine():
                await self._start_engine()
            case AnswerOperation(failed):
                assert self._asked is not None
                message, operation = self._asked
                if not failed and operation != "clear" and self._announcement.card is not None:
                    shown = await self._announcement.published_within(PUBLISH_LIMIT_S)
                    failed = "" if shown else NOT_PUBLISHED
                self._asked = None
                await self._tell(message, failed)
                if operation == "sleep" and not failed:
                    self.asleep.set()
            case NoteFault(text):
                _log.error("%s", text)
            case _:
                assert_never(action)

    async def _ask_engine(self, action: AskEngine) -> list[OperationAction]:
        """Have the engine do it, and return what follows."""
        facts = self._engine.facts
        if action.operation == "load_lora" and action.name in self._operations.loras:  # again
            wrong_files = await self._changed(action)
            if facts is not self._engine.facts:
                return self._operations.on_engine("the engine is lost", lost=True)
            if wrong_files:
                return self._operations.on_engine(wrong_files)
        try:
            failed = await self._operate(action)
            if action.operation == "load_lora" and not failed:
                failed = await self._changed(action)  # while the engine read them
                if failed and (kept := await self._operate(AskEngine("unload_lora", action.name))):
                    raise Unavailable(kept)
        except Unavailable as wrong:
            if facts is not None and facts is self._engine.facts:  # it lives, and is in an unknown state
                self._engine.kill(str(wrong))
            return self._operations.on_engine(str(wrong), lost=True)
        return self._operations.on_engine(failed)

    async def _operate(self, action: AskEngine) -> str:
        """Return the engine's answer. Raise Unavailable without one."""
        return await self._engine.operate(
            action.operation, self._engine_limit_s, name=action.name, path=action.path, level=action.level
        )

    @property
    def _engine_limit_s(self) -> float:
        """The seconds that the engine has for one step of the operation that runs."""
        asked = self._operations.running
        return ENGINE_LIMIT_S if asked is None or asked.engine_s is None else min(asked.engine_s, ENGINE_LIMIT_S)

    async def _start_engine(self) -> None:
        """Start an engine, and end it if it takes longer than this limit and twice as long as the last one. One that
        was stopped before may still be ending: then the limit begins again."""
        self._started.clear()
        self._engine.start()
        limit_s = self._engine_limit_s + 2 * self._engine.start_s
        while not self._started.is_set():
            try:
                async with asyncio.timeout(limit_s):
                    await self._started.wait()
            except TimeoutError:
                self._engine.kill(f"the engine did not start in {limit_s:.0f} s")

    async def _changed(self, action: AskEngine) -> str:
        """Return why the files of a LoRA are not those of its id. Empty if they are."""
        try:
            digest = await _digest(action.path)
        except ModelError as wrong:
            return str(wrong)
        same = make_lora_id(name_of_lora(action.name), digest) == action.name
        return "" if same else f"path: the files of {action.path} have changed"

    async def _await_idle(self, lora: str, within_s: float) -> str:
        """Return what still runs after all limits. Empty if nothing does."""
        if await self.idle_within(within_s, lora):
            return ""
        late = self._attempts.running_with(lora)
        _log.warning("%d attempts did not end in %g s; they are handed back", len(late), within_s)
        self._hand_back(late)
        if await self.idle_within(HAND_BACK_LIMIT_S, lora):
            return ""
        return f"the engine did not end {len(self._attempts.running_with(lora))} attempts in {HAND_BACK_LIMIT_S:g} s"

    async def idle_within(self, limit_s: float, lora: str = "") -> bool:
        """Wait until no attempt with this LoRA is running, or none at all; return whether that was so in time."""
        try:
            async with asyncio.timeout(limit_s):
                while self._attempts.running_with(lora):
                    self._attempts_changed.clear()
                    await self._attempts_changed.wait()
        except TimeoutError:
            return not self._attempts.running_with(lora)
        return True

    async def _tell(self, message: Message, failed: str, *, busy: bool = False) -> None:
        operations = self._operations
        answer = WorkerOperated(self._instance, failed, operations.shown_state, operations.shown_loras, busy)
        await self._answer(message, WORKER_OPERATED.encode(answer, message.headers))


async def _digest(path: str) -> str:
    """Return the digest of a LoRA's files. Raise ModelError. Cancellation ends the reading too."""
    given_up = threading.Event()
    try:
        return await asyncio.to_thread(digest_lora, Path(path), given_up)
    finally:
        given_up.set()
