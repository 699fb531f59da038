"""Decides what `up --on ray` does about the programs that Ray runs. Pure.

    waiting ──due──▶ asked ──Reported──▶ running       Ray places an actor, and starts it again when it
       ▲               │ ◀───Silent─────────┤          or its node dies; it is silent meanwhile
       └─────Lost──────┴────────Lost────────┤          Ray has given it up: ask for another one, after 5 s
                                          Stop, its stage's turn
                                            ▼
                       ended ◀─Drained─ draining       what has never reported is killed at once

A worker may be added, and removed: it is *leaving* until it has drained, and then forgotten.

A kvbm is added for each node from which a worker reports. It is forgotten when Ray has given it up, and added again
with the next report. Stages drain as supervise.py's do.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec import Struct

from deploy.local.ray.order import Order
from deploy.local.stack.supervise import CONFIG_STATUS, AllEnded, Kill, Remove, Stop, Tick

RETRY_S = 5.0
"""Seconds until Ray is asked for a program again that it has given up."""
PATIENCE_S = 15.0
"""Seconds without an answer of an actor after which that is said."""


class ActorReport(Struct, frozen=True):
    """What an actor says about its program."""

    node: str
    host: str
    pid: int
    """The program's process. 0 if it has not started."""
    url: str
    """Base URL of its /health. Empty until it listens, and for servers."""
    status: int | None
    """Its exit status; negative: the signal that ended it. None while it runs."""
    said: list[str]
    """Its last lines."""


# --- events


class Reported(Struct, frozen=True):
    """An actor has answered."""

    name: str
    report: ActorReport
    healthy: bool
    """True if the program would serve now. A server is healthy while it runs."""
    reason: str = ""
    """Why it would not, or notes on its settings."""


class Silent(Struct, frozen=True):
    """An actor does not answer: Ray places it, or starts it again."""

    name: str


class Lost(Struct, frozen=True):
    """Ray has given an actor up."""

    name: str
    why: str


class Drained(Struct, frozen=True):
    """An actor that was drained has ended."""

    name: str


class AddOrder(Struct, frozen=True):
    """One more program is wanted. None of its name may be there."""

    order: Order


Event = Reported | Silent | Lost | Drained | AddOrder | Remove | Stop | Tick

# --- actions


class Create(Struct, frozen=True):
    """Ask Ray for an actor."""

    order: Order


class Drain(Struct, frozen=True):
    """Let the program end, then remove its actor."""

    order: Order


class Notice(Struct, frozen=True):
    """Show a line."""

    text: str


class SayReady(Struct, frozen=True):
    """Say once that requests are served."""


Action = Create | Drain | Kill | Notice | SayReady | AllEnded

# --- the machine

_PERCENT = re.compile(r": \d+ %$")
State = Literal["waiting", "asked", "running", "leaving", "draining", "ended"]


@dataclass(slots=True)
class _Child:
    order: Order
    state: State = "waiting"
    since_s: float = 0.0
    """When it was asked for or was silent first; if waiting, when it is due."""
    known: bool = False
    """True once its actor has reported."""
    ready: bool = False
    pid: int = 0
    """The last process that was ready; before that the first one that was reported."""
    ended_pid: int = 0
    """The last process whose end was said."""
    reason: str = ""
    """What was said of it last."""
    wrong: str = ""
    """Why it cannot work as configured, if it was added. Empty if it can."""
    added: bool = False


class Watch:
    """The state machine of all programs of one `up --on ray`. It takes events with their time; the caller does the
    returned actions in order."""

    def __init__(self, orders: Sequence[Order], store: Order | None) -> None:
        """`store` is the kvbm of any node. None if there is none."""
        self._store = store
        self._children = {order.name: _Child(order) for order in orders}
        self._served = False
        self._stopping = False
        self._reason = ""
        """Why all programs are stopped: the error of the first one that cannot work as configured."""
        self._finished = False
        assert len(self._children) == len(orders), "programs have distinct names"

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Apply an event and return the actions to do. States change only here."""
        actions: list[Action] = []
        match event:
            case Tick():
                for child in self._children.values():
                    if child.state == "waiting" and now_s >= child.since_s:
                        actions += self._create(child, now_s)
            case Reported(name):
                actions += self._reported(self._children[name], event, now_s)
            case Silent(name):
                actions += self._silent(self._children[name], now_s)
            case Lost(name, why):
                actions += self._lost(self._children[name], why, now_s)
            case Drained(name):
                self._drained(name)
            case AddOrder(order):
                if not self._stopping:
                    assert order.name not in self._children, "programs have distinct names"
                    self._children[order.name] = _Child(order, since_s=now_s, added=True)
            case Remove(name):
                actions += self._remove(name)
            case Stop():
                if self._stopping:
                    actions += self._kill(self._alive())
                self._stopping = True
            case _:
                assert_never(event)
        if self._stopping:
            actions += self._drain()
        return actions

    @property
    def stopping(self) -> bool:
        """True once no program will be started again."""
        return self._stopping

    def state(self, name: str) -> State:
        """Return the state of a program. One that is not known has ended."""
        return self._children[name].state if name in self._children else "ended"

    def wrong(self, name: str) -> str:
        """Return why a program that was added cannot work as configured. Empty if it can."""
        return self._children[name].wrong if name in self._children else ""

    def validate(self) -> None:
        """Assert every invariant."""
        states = {child.state for child in self._children.values()}
        assert not self._finished or states <= {"ended"}
        if self._stopping:
            assert "waiting" not in states, "no program waits for a start while stopping"
            assert len({child.order.stage for child in self._children.values() if child.state == "draining"}) <= 1
        else:
            assert "draining" not in states
        nodes = [child.order.node for child in self._children.values() if child.order.service == "kvbm"]
        assert len(nodes) == len(set(nodes)), "a node has one kvbm"

    def _drained(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None and child.state == "leaving":
            del self._children[name]
        elif child is not None:
            child.state = "ended"  # it may have been killed meanwhile

    def _remove(self, name: str) -> list[Action]:
        """Let a program leave. What has never reported is killed: Ray may never find a node for it."""
        child = self._children.get(name)
        if child is None or self._stopping or child.state == "leaving":
            return []
        if child.known and child.state in ("asked", "running"):
            child.state = "leaving"
            return [Drain(child.order)]
        del self._children[name]
        return [Kill(name)] if child.state == "asked" else []

    def _alive(self) -> Sequence[_Child]:
        return [child for child in self._children.values() if child.state != "ended"]

    def _create(self, child: _Child, now_s: float) -> list[Action]:
        child.state, child.since_s = "asked", now_s
        return [Create(child.order)]

    def _reported(self, child: _Child, event: Reported, now_s: float) -> list[Action]:
        order, report = child.order, event.report
        if child.state not in ("asked", "running"):
            return []
        child.state, child.since_s, child.known = "running", now_s, True
        if report.status is not None:
            return self._ended_by_itself(child, report)
        child.pid, child.wrong = child.pid or report.pid, ""
        actions: list[Action] = []
        if event.healthy and not child.ready:
            child.ready = True
            if child.pid != report.pid:
                actions.append(Notice(f"{order.name} has started again at {report.host} and is ready"))
            child.pid = report.pid
        doing = _PERCENT.sub("", event.reason)
        if doing and doing != child.reason and not child.ready:
            actions.append(Notice(f"  {order.name}: {doing}"))
        child.reason = doing
        frontends = [each for each in self._children.values() if each.order.service == "frontend"]
        if not self._served and all(each.ready for each in frontends):
            self._served = True
            actions.append(SayReady())
        if order.service == "worker" and not self._stopping:
            actions += self._store_at(report.node, now_s)
        return actions

    def _store_at(self, node: str, now_s: float) -> list[Action]:
        """Add the kvbm of a node that has a worker."""
        if self._store is None or (order := self._store.at(node)).name in self._children:
            return []
        child = self._children[order.name] = _Child(order)
        return self._create(child, now_s)

    def _ended_by_itself(self, child: _Child, report: ActorReport) -> list[Action]:
        """Say that a program has ended, once for each of its runs; give up what cannot work as configured."""
        name = child.order.name
        if child.ended_pid == report.pid:
            return []
        child.ended_pid, child.ready = report.pid, False
        assert report.status is not None
        said = "".join(report.said[-1:])
        child.wrong = said or "it ended without a word" if child.added and report.status == CONFIG_STATUS else ""
        if report.status == CONFIG_STATUS and not self._served and child.order.needed and not child.added:
            self._stopping, self._reason = True, f"error: {name}: {said}"
            lines = "\n  ".join([f"error: {name} at {report.host} cannot work as configured:", *report.said])
            return [Notice(lines)]
        if report.status == CONFIG_STATUS and not child.order.needed:
            return [Notice(f"without {name} at {report.host}: {said}"), *self._kill([child])]
        spelled = f"status {report.status}" if report.status >= 0 else signal.Signals(-report.status).name
        why = f": {said}" if said and report.status > 0 else ""
        return [Notice(f"{name} ended at {report.host} ({spelled}); Ray starts it again{why}")]

    def _silent(self, child: _Child, now_s: float) -> list[Action]:
        if child.state == "running":
            child.state, child.since_s, child.ready, child.reason = "asked", now_s, False, ""
        if child.state != "asked" or child.reason == "silent" or now_s - child.since_s < PATIENCE_S:
            return []
        child.reason = "silent"
        order = child.order
        needs = [f"{number:g} {unit}" for number, unit in ((order.gpus, "GPU"), (order.cpus, "CPU")) if number]
        wants = f" with {' and '.join(needs)} free" if needs else ""
        return [Notice(f"{order.name} does not answer: Ray looks for a node{wants}, or starts it")]

    def _lost(self, child: _Child, why: str, now_s: float) -> list[Action]:
        name = child.order.name
        if child.state not in ("asked", "running"):
            return []
        if child.order.service == "kvbm":
            del self._children[name]
            return []
        child.state, child.since_s, child.ready = "waiting", now_s + RETRY_S, False
        return [Notice(f"{name}: {why}")]

    def _drain(self) -> list[Action]:
        """Drain the lowest stage that has not ended; report the end when no program is left."""
        actions: list[Action] = []
        for child in self._children.values():
            if child.state == "waiting":
                child.state = "ended"
        alive = self._alive()
        if not alive:
            if not self._finished:
                self._finished = True
                said = [Notice(self._reason)] if self._reason else []  # shown before, but scrolled away since
                actions += [*said, AllEnded(1 if self._reason else 0)]
            return actions
        stage = min(child.order.stage for child in alive)
        turn = [child for child in alive if child.order.stage == stage]
        if unknown := [child for child in turn if not child.known]:  # Ray may never find a node for it
            return self._kill(unknown) + self._drain()
        for child in turn:
            if child.state not in ("leaving", "draining"):
                child.state = "draining"
                actions.append(Drain(child.order))
        return actions

    def _kill(self, children: Sequence[_Child]) -> list[Action]:
        killed = [child for child in children if child.state != "waiting"]
        for child in children:
            child.state = "ended"
        return [Kill(child.order.name) for child in killed]
