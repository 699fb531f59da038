"""Decides which models of a device are awake. Pure: what is seen, what is waited for and the time in; orders out.

    gone ◀─▶ asleep ──wake: there is room──▶ waking ──▶ awake ──sleep: another one is waited for──▶ falling asleep
               ▲ ▲                             │          ▲ its turn is over, or it is not in use        │    │
               │ └────── it could not ─────────┘          └──────────────── it could not ───────────────┘    │
               └──────────────────────────── its answers have ended ─────────────────────────────────────────┘

    drained: an operator has drained its worker. It holds the device until another model is waited for.

Models that are waited for wake in the order in which the wait for each began. So each of n models waits at most for
the turns of n - 1 others, as long as they fall asleep and wake.

    a turn     least_awake_s at least, and as long as the wake took, so that half of the time is not for changes;
               then as long as no other is waited for; then until it is not in use, or turn_s
    to leave   first what is not in use, the least recently used one first; then what has been awake longest

On a GPU an engine needs the room of a model that is awake also to load. While its worker says that it loads, it counts
as one, and is not asked for anything: others give way to it as to one that is waited for.

A worker that is silent while others report is asked for nothing. It may be frozen, and holds what it has: models for
which there is no room because of it fail at once, and say so. An order that it has not answered is forgotten when it
reports again, as it may be lost; one to wake that it has not begun is forgotten at once.

Nothing is kept: a process that starts again learns from discovery who sleeps, and from the frontends, which repeat it,
who is waited for. Two of them for one device might have too many models awake for a while; then some go to sleep
(docs/decisions/0084).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from services.worker.turns.config import TurnsConfig
from shared.messages.turns import ModelTurn, TurnStage, WantModel

MOST_MODELS = 64
"""The most models that take turns on one device."""
MOST_FRONTENDS = 1024
"""The most frontends at which requests for one model are known to wait."""
WANTED_S = 2.0
"""Seconds for which a frontend's WantModel holds. Frontends repeat it four times within them."""
IDLE_S = 0.6
"""Seconds since its last use after which a model is not in use: workers report every 0.25 s."""
ANSWER_HOLDS_S = 2.0
"""Seconds for which a worker's answer counts, whatever discovery says: discovery may know of it later."""
BUSY_PAUSE_S = 0.5
"""Seconds after which a worker that does something else is asked again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Seconds after which a worker that has failed is asked again: twice as long each time."""

SILENT_S = 10.0
"""Seconds without a report, while other workers of the device report, after which a worker is silent."""
REPORTS_APART_S = 0.5
"""The most seconds between two reports that count as silence of the others: beyond that, all are silent, or this
process stood still."""

TurnOperation = Literal["wake", "sleep"]
_HOLDING: tuple[TurnStage, ...] = ("waking", "awake", "drained", "falling asleep")
"""The stages of models that take room on the device."""


class TurnOrder(Struct, frozen=True):
    """Have a worker do this, and call `answered`."""

    model: str
    instance: str
    operation: TurnOperation


@dataclass
class _Wait:
    """Requests that wait for a model at one frontend."""

    waiting: int
    since_s: float
    until_s: float


@dataclass
class _TurnTaker:
    """What is known of one model."""

    instance: str = ""
    stage: TurnStage = "gone"
    since_s: float = 0.0
    """When it came into this stage."""
    woke_s: float = 0.0
    """When its turn began that the latest order to sleep was to end."""
    seen: TurnStage = "gone"
    """Its stage as discovery has it."""
    asked: bool = False
    """Whether its worker has an order of ours."""
    busy: bool = False
    """Whether its worker computes."""
    used_s: float = 0.0
    """When it was used last."""
    wake_s: float = 0.0
    """How long its last wake took."""
    answered_s: float = -ANSWER_HOLDS_S
    """When its worker answered last."""
    waits: dict[str, _Wait] = field(default_factory=dict)
    queued_s: float | None = None
    """When the wait for it began. None if nothing waits for it, or it is awake."""
    why: str = ""
    """What its worker answered last, if that was not what was asked for."""
    could_not_wake: bool = False
    loads_until_s: float = 0.0
    """Until when it holds that its worker's engine loads."""
    silent_s: float = 0.0
    """For how long its worker has not reported although others have."""
    pause_s: float = 0.0
    retry_s: float = 0.0
    """When its worker may have the next order."""

    def enter(self, stage: TurnStage, now_s: float) -> None:
        if stage != self.stage:
            self.stage, self.since_s = stage, now_s

    def loads(self, now_s: float) -> bool:
        """Whether its engine loads, and needs the room of a model that is awake."""
        return self.loads_until_s > now_s and self.stage not in _HOLDING

    @property
    def is_silent(self) -> bool:
        return bool(self.instance) and self.silent_s >= SILENT_S

    @property
    def silence(self) -> str:
        """What people are shown of a silent worker."""
        silent = f"its worker {self.instance} has been silent for {self.silent_s:.0f} s"
        return f"{silent}: resume it if it is stopped, or end it"

    def is_used(self, now_s: float) -> bool:
        return self.busy or bool(self.waits) or now_s - self.used_s < IDLE_S


class DeviceTurns:
    """The turns of the models on one device. Times are seconds on one clock."""

    def __init__(self, config: TurnsConfig) -> None:
        self._config = config
        self._models: dict[str, _TurnTaker] = {}
        self._reported_s = 0.0
        """When any worker reported last."""

    # --- what is seen

    def worker_seen(self, model: str, instance: str, stage: TurnStage, now_s: float) -> bool:
        """Record the worker of a model and its stage in discovery; if there is none, an empty id and `gone`. Return
        whether the model is known: those beyond MOST_MODELS are not."""
        if model not in self._models and len(self._models) >= MOST_MODELS:
            return False
        taker = self._models.setdefault(model, _TurnTaker(since_s=now_s))
        taker.seen = stage
        if instance != taker.instance:
            taker.instance, taker.asked, taker.busy, taker.answered_s = instance, False, False, -ANSWER_HOLDS_S
            taker.why, taker.could_not_wake, taker.pause_s, taker.retry_s = "", False, 0.0, 0.0
            taker.silent_s = taker.loads_until_s = 0.0
        self._update(taker, now_s)
        return True

    def worker_reported(self, model: str, instance: str, *, busy: bool, now_s: float) -> None:
        """Record whether a worker computes, or has computed since its last report."""
        taker = self._models.get(model)
        if taker is None or taker.instance != instance:
            return
        taker.busy = busy
        taker.used_s = now_s if busy else taker.used_s
        passed_s = min(now_s - self._reported_s, REPORTS_APART_S)
        self._reported_s = now_s
        for other in self._models.values():
            other.silent_s += passed_s
        if taker.is_silent and taker.asked:
            taker.asked, taker.answered_s, taker.retry_s = False, -ANSWER_HOLDS_S, now_s + BUSY_PAUSE_S
        taker.silent_s = 0.0
        self._update(taker, now_s)

    def wanted(self, want: WantModel, now_s: float) -> ModelTurn:
        """Record that requests wait for a model at a frontend, or that its engine loads, and return its turn."""
        taker = self._models.get(want.model)
        if taker is None and want.loads and len(self._models) < MOST_MODELS:
            taker = self._models[want.model] = _TurnTaker(since_s=now_s)
        if taker is None:
            return ModelTurn(want.model, "gone", why="no worker has it")
        if want.loads:
            taker.loads_until_s = now_s + WANTED_S
        elif want.waiting <= 0:
            taker.waits.pop(want.frontend, None)
        elif want.frontend in taker.waits or len(taker.waits) < MOST_FRONTENDS:
            taker.waits[want.frontend] = _Wait(want.waiting, now_s - max(0.0, want.oldest_s), now_s + WANTED_S)
        self._update(taker, now_s)
        return self._turn(want.model, taker, now_s)

    def answered(
        self, order: TurnOrder, failed: str, stage: TurnStage | None, *, busy: bool = False, now_s: float
    ) -> None:
        """Record what became of an order: `stage` is the worker's after it, None if there was no answer. `busy` says
        that it failed because the worker did something else."""
        taker = self._models.get(order.model)
        if taker is None or not taker.asked or taker.instance != order.instance:
            return
        taker.asked = False
        if order.operation == "wake":
            taker.wake_s = now_s - taker.since_s
        between = busy and stage == "drained"  # old as soon as what the worker does ends, which discovery shows
        taker.answered_s = -ANSWER_HOLDS_S if stage is None or between else now_s
        taker.enter(taker.seen if stage is None else stage, now_s)
        if order.operation == "sleep" and taker.stage == "awake":  # it could not: its turn goes on, and is no new one
            taker.since_s = taker.woke_s
        taker.why, taker.could_not_wake = failed, bool(failed) and not busy and order.operation == "wake"
        if not failed:
            taker.pause_s = 0.0
            taker.used_s = now_s
        elif busy:
            taker.retry_s = now_s + BUSY_PAUSE_S
        else:
            taker.pause_s = min(max(2 * taker.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            taker.retry_s = now_s + taker.pause_s

    # --- what follows

    def decide(self, now_s: float) -> list[TurnOrder]:
        """Return the orders of this moment. Each is answered once, by `answered`, unless its worker goes before."""
        for model, taker in list(self._models.items()):
            self._update(taker, now_s)
            if taker.stage == "gone" and not (taker.waits or taker.loads(now_s)):
                del self._models[model]
        most, models = self._config.awake, self._models.items()
        holding = [(model, taker) for model, taker in models if taker.stage in _HOLDING]
        queued = self._queue(now_s)
        queue = [(model, taker) for model, taker in queued if taker.retry_s <= now_s and not taker.is_silent]
        room = most - len(holding) - len(self._loading(now_s))
        woken = queue[: max(0, room)]
        leaving = sum(taker.stage == "falling asleep" for _, taker in holding)
        needed = min(len(queue) - len(woken), most) + max(0, -room) - leaving
        leavers = sorted(
            (one for one in holding if self._may_leave(one[1], now_s)), key=lambda one: _leaver_place(one, now_s)
        )
        orders = [self._order(model, taker, "wake", now_s) for model, taker in woken]
        return orders + [self._order(model, taker, "sleep", now_s) for model, taker in leavers[: max(0, needed)]]

    def _queue(self, now_s: float) -> list[tuple[str, _TurnTaker]]:
        """Return the models that sleep and are waited for, the longest wait first."""
        waited = [
            (taker.queued_s, model)
            for model, taker in self._models.items()
            if taker.stage == "asleep" and taker.queued_s is not None and not taker.loads(now_s)
        ]
        return [(model, self._models[model]) for _, model in sorted(waited)]

    def _loading(self, now_s: float) -> list[str]:
        """Return the models whose engines load."""
        return sorted(model for model, taker in self._models.items() if taker.loads(now_s))

    def _may_leave(self, taker: _TurnTaker, now_s: float) -> bool:
        if taker.retry_s > now_s or taker.is_silent or taker.stage not in ("awake", "drained"):
            return False
        awake_s = now_s - taker.since_s
        over = not taker.is_used(now_s) or awake_s >= self._config.turn_s
        least_s = min(max(self._config.least_awake_s, taker.wake_s), self._config.turn_s)
        return taker.stage == "drained" or (awake_s >= least_s and over)

    def _order(self, model: str, taker: _TurnTaker, operation: TurnOperation, now_s: float) -> TurnOrder:
        taker.asked = True
        taker.woke_s = taker.since_s
        taker.enter("waking" if operation == "wake" else "falling asleep", now_s)
        return TurnOrder(model, taker.instance, operation)

    def _update(self, taker: _TurnTaker, now_s: float) -> None:
        """Follow discovery, forget what frontends no longer repeat, and note since when the model is waited for."""
        if taker.is_silent and taker.stage == "waking" and taker.seen == "asleep":
            taker.asked, taker.answered_s = False, -ANSWER_HOLDS_S  # it has not begun, so it holds nothing
        if not taker.asked and now_s - taker.answered_s >= ANSWER_HOLDS_S:
            taker.enter(taker.seen, now_s)
        for frontend in [frontend for frontend, wait in taker.waits.items() if wait.until_s <= now_s]:
            del taker.waits[frontend]
        waited = bool(taker.waits) and taker.stage != "awake"
        taker.queued_s = (now_s if taker.queued_s is None else taker.queued_s) if waited else None

    # --- what is shown

    def shown(self, now_s: float) -> list[ModelTurn]:
        """Return the turns of all models, by name."""
        return [self._turn(model, taker, now_s) for model, taker in sorted(self._models.items())]

    def _turn(self, model: str, taker: _TurnTaker, now_s: float) -> ModelTurn:
        oldest_s = min((wait.since_s for wait in taker.waits.values()), default=now_s)
        return ModelTurn(
            model,
            taker.stage,
            for_s=round(now_s - taker.since_s, 3),
            waiting=sum(wait.waiting for wait in taker.waits.values()),
            oldest_s=round(now_s - oldest_s, 3),
            why=self._why(model, taker, now_s) if taker.waits and taker.stage != "awake" else "",
            failed=self._failed(taker, now_s),
        )

    def _failed(self, taker: _TurnTaker, now_s: float) -> str:
        """Return why requests need not wait for a model. Empty if they may."""
        if taker.is_silent:
            return taker.silence
        if taker.could_not_wake and taker.retry_s > now_s:
            return taker.why
        silent = sorted(name for name, other in self._models.items() if other.stage in _HOLDING and other.is_silent)
        if taker.stage in _HOLDING or len(silent) < self._config.awake:
            return ""
        held = "; ".join(f"{name}: {self._models[name].silence}" for name in silent)
        return f"{', '.join(silent)} {'holds' if len(silent) == 1 else 'hold'} {self._config.device}; {held}"

    def _why(self, model: str, taker: _TurnTaker, now_s: float) -> str:
        """Return why a model that is waited for is not awake yet."""
        loading = self._loading(now_s)
        if model in loading:
            return "its engine is loading"
        match taker.stage:
            case "gone":
                return "its worker is gone"
            case "drained":
                return "its worker is drained; an operator can let it resume"
            case "waking" | "falling asleep":
                return f"it is {taker.stage}"
            case _:
                pass
        if taker.why:
            return taker.why
        holding = sorted(name for name, other in self._models.items() if other.stage in _HOLDING)
        if len(holding) >= self._config.awake:
            turn = f"{', '.join(holding)} {'has its' if len(holding) == 1 else 'have their'} turn"
            return turn + "".join(f"; {name}: {why}" for name in holding if (why := self._models[name].why))
        if len(holding) + len(loading) >= self._config.awake:
            return f"{', '.join(loading)} {'loads, and needs' if len(loading) == 1 else 'load, and need'} the room"
        before = [name for name, _ in self._queue(now_s)].index(model)
        return f"its turn comes after those of {before} others" if before else "its turn comes next"

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert len(self._models) <= MOST_MODELS
        for taker in self._models.values():
            assert (taker.stage == "gone") == (taker.instance == "")
            assert taker.asked == (taker.stage in ("waking", "falling asleep"))
            assert len(taker.waits) <= MOST_FRONTENDS
            assert taker.pause_s <= LONGEST_PAUSE_S


def _leaver_place(one: tuple[str, _TurnTaker], now_s: float) -> tuple[bool, float, str]:
    """Return the place of a model among those that may leave."""
    model, taker = one
    used = taker.is_used(now_s)
    return used, taker.since_s if used else taker.used_s, model
