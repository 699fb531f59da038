"""Decides what `up` does with the programs it has started: restart, back-off, order of the drain. Pure.

    waiting ──Tick, due──▶ running ──Exited──▶ waiting           after 0.5 s, doubling to 10 s; reset by a steady run
       │                     │   └──Exited with status 2──▶ ended: its configuration is wrong. If the others need
       │                     │                              it, all programs are stopped. This holds only before all
       │                     │                              have served once; later it waits, as after any other end
       │                    Stop, its stage's turn
       │                     ▼
       │                  stopping ──Tick, limit passed──▶ killed
       │                     └───────────Exited──▶ ended ◀──Exited──┘
       └──Stop──▶ ended                              running ──second Stop──▶ killed

Programs begin as running; late ones begin as waiting and are due 1 s after the others serve. A program that is added
later begins as running too. If its configuration is wrong it has ended, whatever served before; who added it may remove
it and add it again. A program that is removed drains alone, and is forgotten once it has ended.
Stages drain in the order of their numbers, each when the one before has ended. The frontends are first, so that
accepted requests are answered; NATS and etcd, which all others need, are last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, assert_never

from msgspec import Struct

CONFIG_STATUS = 2
"""The exit status of a service whose settings or model cannot work, however often it is started."""
FIRST_DELAY_S = 0.5
"""The first delay of the back-off."""
LAST_DELAY_S = 10.0
"""The longest delay of the back-off."""
LATE_S = 1.0
"""Delay between the moment when the others serve and the start of a late program: the first answer is under way by
then."""
STEADY_S = 30.0
"""A run of this length resets the back-off of its program."""


class Program(Struct, frozen=True):
    """A program that `up` supervises."""

    name: str
    stage: int
    """Stage of the drain; the lowest is drained first."""
    drain_limit_s: float
    """Time from SIGTERM to SIGKILL."""
    needed: bool = True
    """True if all programs are stopped when this one cannot work as configured."""
    late: bool = False
    """True if it starts only after the others serve, so that it does not slow their start."""


# --- events


class Begin(Struct, frozen=True):
    """`up` begins: start all programs except the late ones."""


class Serving(Struct, frozen=True):
    """The frontends are ready to serve."""


class Exited(Struct, frozen=True):
    """A child has ended; a negative status is the signal that ended it."""

    name: str
    status: int


class Stop(Struct, frozen=True):
    """The user asked to stop; the second time: to stop at once."""


class Tick(Struct, frozen=True):
    """Time has passed."""


class Add(Struct, frozen=True):
    """One more program is wanted. It is not needed, and no program of its name is known."""

    program: Program


class Remove(Struct, frozen=True):
    """A program is not wanted any more."""

    name: str


Event = Begin | Serving | Exited | Stop | Tick | Add | Remove

# --- actions


class Start(Struct, frozen=True):
    """Start the program now."""

    name: str


class Terminate(Struct, frozen=True):
    """Send SIGTERM to the program."""

    name: str


class Kill(Struct, frozen=True):
    """Send SIGKILL, to all of the program's process group."""

    name: str


class Restarting(Struct, frozen=True):
    """Report that the program ended by itself and will start again. If the status is 2, the others go on without it."""

    name: str
    status: int
    delay_s: float


class Misconfigured(Struct, frozen=True):
    """Report, with the last lines of its log, that the program cannot work as configured."""

    name: str
    needed: bool
    """True if all programs are stopped because of it."""


class AllEnded(Struct, frozen=True):
    """Report that every program has ended; no action follows."""

    status: int
    """Exit status of `up`: 1 if a needed program could not work as configured, else 0."""


Action = Start | Terminate | Kill | Restarting | Misconfigured | AllEnded

# --- the machine

State = Literal["waiting", "running", "stopping", "killed", "ended"]


@dataclass(slots=True)
class _Child:
    program: Program
    state: State = "waiting"
    due_s: float = inf
    """Time to start if waiting (inf: when the others serve), time to kill if stopping; else without meaning."""
    started_s: float = 0.0
    delay_s: float = FIRST_DELAY_S
    """The next delay of the back-off."""
    starts: int = 0
    added: bool = False
    leaves: bool = False
    """True once it is removed."""


class Supervisor:
    """The state machine of all programs of one `up`. It takes events with their time; the caller does the returned
    actions in order."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._children = {program.name: _Child(program) for program in programs}
        self._begun = False
        self._served = False
        self._stopping = False
        self._status = 0
        self._finished = False
        assert len(self._children) == len(programs), "programs have distinct names"

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Apply an event and return the actions to do. States change only here."""
        actions: list[Action] = []
        match event:
            case Begin():
                assert not self._begun
                self._begun = True
                for child in self._children.values():
                    actions += [] if child.program.late else self._start(child, now_s)
            case Serving():
                self._served = True
                for child in self._children.values():
                    if child.program.late and child.state == "waiting":
                        child.due_s = min(child.due_s, now_s + LATE_S)
            case Exited(name, status):
                actions += self._exited(self._children[name], status, now_s)
            case Stop():
                if self._stopping:
                    actions += self._kill_all()
                self._stopping = True
            case Tick():
                for child in self._children.values():
                    actions += self._due(child, now_s)
            case Add(program):
                assert program.name not in self._children, program
                assert not program.needed, program
                child = self._children[program.name] = _Child(program, added=True)
                actions += self._start(child, now_s) if self._begun and not self._stopping else []
            case Remove(name):
                actions += self._remove(self._children[name], now_s)
            case _:
                assert_never(event)
        for name in [name for name, child in self._children.items() if child.leaves and child.state == "ended"]:
            del self._children[name]
        if self._stopping:
            actions += self._drain(now_s)
        return actions

    @property
    def next_due_s(self) -> float | None:
        """Time of the next Tick that has an effect. None means to wait for other events only."""
        due_s = min(
            (each.due_s for each in self._children.values() if each.state in ("waiting", "stopping")), default=inf
        )
        return due_s if due_s < inf else None

    @property
    def stopping(self) -> bool:
        """True once no program will be started again."""
        return self._stopping

    def state(self, name: str) -> State:
        """Return the state of a program."""
        return self._children[name].state

    def knows(self, name: str) -> bool:
        """Return whether there is a program of this name. One that was removed is known until it has ended."""
        return name in self._children

    def validate(self) -> None:
        """Assert every invariant."""
        states = {child.state for child in self._children.values()}
        assert not self._finished or states <= {"ended"}
        if not self._stopping:
            for child in self._children.values():
                ended = child.state == "ended" and not child.program.needed
                assert child.state in ("waiting", "running") or ended or child.leaves
            return
        assert "waiting" not in states, "no program waits for a start while stopping"
        staying = [child for child in self._children.values() if not child.leaves]
        drained = {child.program.stage for child in staying if child.state == "stopping"}
        assert len(drained) <= 1, f"two stages drain at once: {drained}"
        for child in self._children.values():
            assert FIRST_DELAY_S <= child.delay_s <= LAST_DELAY_S

    def _start(self, child: _Child, now_s: float) -> list[Action]:
        child.state, child.started_s = "running", now_s
        child.starts += 1
        return [Start(child.program.name)]

    def _exited(self, child: _Child, status: int, now_s: float) -> list[Action]:
        assert child.state in ("running", "stopping", "killed"), child
        name, wanted = child.program.name, child.state == "running" and not self._stopping
        child.state = "ended"
        if not wanted:
            return []
        if status == CONFIG_STATUS and self._misconfigured(child):
            if child.program.needed:
                self._status, self._stopping = 1, True
            return [Misconfigured(name, child.program.needed)]
        if now_s - child.started_s >= STEADY_S:
            child.delay_s = FIRST_DELAY_S
        delay_s = child.delay_s
        child.state, child.due_s = "waiting", now_s + delay_s
        child.delay_s = min(2 * delay_s, LAST_DELAY_S)
        return [Restarting(name, status, delay_s)]

    def _misconfigured(self, child: _Child) -> bool:
        """Return whether a program that ended with status 2 is given up.

        Once all have served, the configuration was right: the reason may go away, and the other programs go on. A
        program that is not needed is given up after its first start, an added one after each.
        """
        return not self._served or child.added or (not child.program.needed and child.starts == 1)

    def _remove(self, child: _Child, now_s: float) -> list[Action]:
        child.leaves = True
        if child.state == "waiting":
            child.state = "ended"
        if child.state != "running":
            return []
        child.state, child.due_s = "stopping", now_s + child.program.drain_limit_s
        return [Terminate(child.program.name)]

    def _due(self, child: _Child, now_s: float) -> list[Action]:
        if child.state == "waiting" and now_s >= child.due_s:
            return self._start(child, now_s)
        if child.state == "stopping" and now_s >= child.due_s:
            child.state = "killed"
            return [Kill(child.program.name)]
        return []

    def _drain(self, now_s: float) -> list[Action]:
        """Terminate the lowest stage that has not ended; report the end when no program is left."""
        actions: list[Action] = []
        for child in self._children.values():
            if child.state == "waiting":
                child.state = "ended"
        alive = [child for child in self._children.values() if child.state != "ended"]
        if not alive:
            if not self._finished:
                self._finished = True
                actions.append(AllEnded(self._status))
            return actions
        stage = min(child.program.stage for child in alive)
        for child in alive:
            if child.program.stage == stage and child.state == "running":
                child.state, child.due_s = "stopping", now_s + child.program.drain_limit_s
                actions.append(Terminate(child.program.name))
        return actions

    def _kill_all(self) -> list[Action]:
        actions: list[Action] = []
        for child in self._children.values():
            if child.state in ("running", "stopping"):
                child.state = "killed"
                actions.append(Kill(child.program.name))
        return actions
