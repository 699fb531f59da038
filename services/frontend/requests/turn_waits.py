"""Requests for models that take turns on a device: each waits here until its model is awake.

    a worker's entry in discovery names the device ─▶ the model takes turns; its card ─▶ it is awake
    a request for a model without a card waits, until there is one, `asleep_s` has passed, or the model could not wake

A model may take turns on several devices, of several machines. Requests for it wait at one of them, which follows from
its name, so that all frontends ask the same one; and at the next one if it cannot wake there.

While requests wait, the process that decides for the device (services/worker/turns) hears of them again and again. So
it may be killed and started again, and hears no more of requests whose clients have left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from zlib import crc32

from services.frontend.metrics import Metrics
from services.frontend.models.registry import MODELS_LIMIT
from shared import subjects
from shared.discovery.directory import CardDown, CardUp, DirectoryChange, InstanceUp
from shared.errors import ProtocolError, RequestTimeout, Unavailable
from shared.messages.cards import Instance, TurnTaker
from shared.messages.turns import MODEL_TURN, WANT_MODEL, ModelTurn, WantModel
from shared.runtime.runtime import Runtime

ASK_EVERY_S = 0.5
"""Seconds between two questions whose turn it is."""
ANSWER_LIMIT_S = 1.0
"""Seconds that an answer may take."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks whether a client that waits is still there."""
_NO_ANSWER = "the process that decides whose turn it is does not answer"


@dataclass
class _SleepingModel:
    """A model that requests wait for."""

    began_s: dict[int, float] = field(default_factory=dict)
    """When each of the requests began to wait, the first one first."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, by each change."""
    turn: ModelTurn | None = None
    """The last answer. None before the first, and if there is none."""

    def announce_change(self) -> None:
        """Wake the requests that wait."""
        self.changed.set()
        self.changed = asyncio.Event()


class TurnWaits:
    """The requests of this frontend that wait for their model's turn. Admission bounds their number."""

    def __init__(self, runtime: Runtime, limit_s: float, metrics: Metrics) -> None:
        self._runtime = runtime
        self._limit_s = limit_s
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self._devices: dict[str, str] = {}
        """Model that takes turns, or has done so → its device."""
        self._awake: dict[str, set[str]] = {}
        """Model → its workers that are awake."""
        self._sleeping: dict[str, _SleepingModel] = {}
        """The models that requests wait for."""
        self._numbers = count()
        runtime.directory.subscribe(self._on_change)

    def takes_turns(self, model: str) -> bool:
        """Return whether the model takes turns, or has done so."""
        return model in self._devices

    def is_asleep(self, model: str) -> bool:
        """Return whether a request for the model must wait for its turn."""
        return model in self._devices and not self._awake.get(model)

    async def wait_awake(self, model: str, since_s: float, is_wanted: Callable[[], bool]) -> str:
        """Wait until the model is awake, or the request is no longer wanted. Return why it was given up; empty if it
        was not. It has waited since `since_s`, perhaps with turns in between that routers did not know of in time."""
        began_s = self._now()
        sleeping = self._sleeping.get(model)
        if sleeping is None:
            sleeping = self._sleeping[model] = _SleepingModel()
            self._runtime.tasks.create_task(self._ask(model, sleeping), name=f"turn of {model}")
        number = next(self._numbers)
        sleeping.began_s[number] = began_s
        outcome = "left"
        try:
            while is_wanted():
                left_s = since_s + self._limit_s - self._now()
                is_awake, turn = bool(self._awake.get(model)), sleeping.turn
                if is_awake and left_s > 0:
                    outcome = "woken"
                    return ""
                if turn is not None and turn.failed:
                    outcome = "failed"
                    return f"the model {model!r} is asleep, and could not wake: {turn.failed}"
                if left_s <= 0:
                    outcome = "late"
                    if is_awake:
                        return f"the model {model!r} has woken, but no router knew of it within {self._limit_s:g} s"
                    why = _NO_ANSWER if turn is None else turn.why or f"it is {turn.stage}"
                    return f"the model {model!r} is asleep, and was not woken within {self._limit_s:g} s: {why}"
                await _wait_for(sleeping.changed, min(left_s, LOOK_EVERY_S))
            return ""
        finally:
            del sleeping.began_s[number]
            self._metrics.turn_waits.labels(outcome).inc()
            self._metrics.turn_wait.observe(self._now() - began_s)

    async def _ask(self, model: str, sleeping: _SleepingModel) -> None:
        """Say that requests wait, again and again, until none does. If the model cannot wake on one device, ask the
        next one; what the last of them answered counts."""
        at = tried = 0
        device = ""
        while sleeping.began_s:
            devices = self._devices_of(model)
            device = devices[at % len(devices)]
            began_s = next(iter(sleeping.began_s.values()))
            want = WantModel(self._runtime.instance, model, len(sleeping.began_s), self._now() - began_s)
            turn = await self._answer(device, want)
            if turn is None or turn.failed or turn.stage == "gone":
                at, tried = at + 1, tried + 1
                if tried < len(devices):
                    continue
            tried = 0
            sleeping.turn = turn
            if turn is not None and turn.failed:
                sleeping.announce_change()
            await _wait_for(sleeping.changed, ASK_EVERY_S)
        del self._sleeping[model]
        if device:
            await self._answer(device, WantModel(self._runtime.instance, model, 0, 0.0))

    def _devices_of(self, model: str) -> list[str]:
        """Return the devices on which the model takes turns, in the order in which they are asked; or the last one on
        which it did."""
        takers = [each.turns for each in self._runtime.directory.instances.values()]
        found = sorted({taker.device for taker in takers if taker is not None and taker.card.model == model})
        first = crc32(model.encode()) % len(found) if found else 0
        return [*found[first:], *found[:first]] or [self._devices[model]]

    async def _answer(self, device: str, want: WantModel) -> ModelTurn | None:
        subject = subjects.turns(self._runtime.namespace, device)
        try:
            reply = await self._runtime.bus.request(subject, WANT_MODEL.encode(want), timeout_s=ANSWER_LIMIT_S)
            return MODEL_TURN.decode(reply.payload, reply.headers)
        except (Unavailable, RequestTimeout, ProtocolError):
            return None

    def _on_change(self, change: DirectoryChange) -> None:
        match change:
            case CardUp(card):
                self._awake.setdefault(card.model, set()).add(card.instance)
                if card.model in self._sleeping:
                    self._sleeping[card.model].announce_change()
            case CardDown(card):
                workers = self._awake.get(card.model, set())
                workers.discard(card.instance)
                if not workers:
                    self._awake.pop(card.model, None)
            case InstanceUp(Instance(turns=TurnTaker(device, card))):
                if card.model in self._devices or len(self._devices) < MODELS_LIMIT:
                    self._devices[card.model] = device
            case _:
                pass


async def _wait_for(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
