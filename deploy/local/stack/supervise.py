"""What `up` decides about the programs it has started: restart, back-off, the order of the drain. Pure.

    waiting ──Tick, due──▶ running ──Exited──▶ waiting           0.5 s, doubling to 10 s; afresh after a steady run
       │                     │   └──Exited with status 2──▶ ended, its configuration is wrong; all is stopped then,
       │                     │                              unless the others can do without it. Only before all has
       │                     │                              served once: later it waits, as after any other end
       │                    Stop, its stage's turn
       │                     ▼
       │                  stopping ──Tick, limit passed──▶ killed
       │                     └───────────Exited──▶ ended ◀──Exited──┘
       └──Stop──▶ ended                              running ──second Stop──▶ killed

Programs begin as running, late ones as waiting: they are due 1 s after the others serve.
Stages drain from the lowest number up, each only when the one before has ended: the frontend first, so that what it has
taken is answered, the servers that all the others need last.
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
LAST_DELAY_S = 10.0
LATE_S = 1.0
"""A late program starts so long after the others serve: the first answer is under way then."""
STEADY_S = 30.0
"""A program that ran this long and then ended starts its back-off afresh."""


class Program(Struct, frozen=True):
    """One child."""

    name: str
    stage: int
    """When it is drained: lowest first."""
    drain_limit_s: float
    """From SIGTERM to SIGKILL."""
    needed: bool = True
    """Whether all is stopped where it cannot work as configured."""
    late: bool = False
    """Whether it leaves the machine to the others until they serve."""


# --- events


class Begin(Struct, frozen=True):
    """Start everything but what is late."""


class Serving(Struct, frozen=True):
    """What clients wait for is there."""


class Exited(Struct, frozen=True):
    """A child has ended; a negative status is the signal that ended it."""

    name: str
    status: int


class Stop(Struct, frozen=True):
    """Someone asked to stop; a second time: at once."""


class Tick(Struct, frozen=True):
    """Time has passed."""


Event = Begin | Serving | Exited | Stop | Tick

# --- actions


class Start(Struct, frozen=True):
    """Start the program now."""

    name: str


class Terminate(Struct, frozen=True):
    """Send SIGTERM."""

    name: str


class Kill(Struct, frozen=True):
    """Send SIGKILL, to all of the program's process group."""

    name: str


class Restarting(Struct, frozen=True):
    """Tell: it ended by itself and will be started again; status 2: the others go on without it until then."""

    name: str
    status: int
    delay_s: float


class Misconfigured(Struct, frozen=True):
    """Tell, with the last lines of its log: it cannot work as it is configured."""

    name: str
    needed: bool
    """Whether all is stopped for that."""


class AllEnded(Struct, frozen=True):
    """Every program has ended; nothing follows."""

    status: int
    """0, or 1 where a program that was needed was hopeless."""


Action = Start | Terminate | Kill | Restarting | Misconfigured | AllEnded

# --- the machine

State = Literal["waiting", "running", "stopping", "killed", "ended"]


@dataclass(slots=True)
class _Child:
    program: Program
    state: State = "waiting"
    due_s: float = inf
    """waiting: when to start (inf: when all serves); stopping: when to kill; else meaningless."""
    started_s: float = 0.0
    delay_s: float = FIRST_DELAY_S
    """The next back-off."""
    starts: int = 0


class Supervisor:
    """All children of one `up`. Feed it events with the time; do what it returns, in order."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._children = {program.name: _Child(program) for program in programs}
        self._begun = False
        self._served = False
        self._stopping = False
        self._status = 0
        self._finished = False
        assert len(self._children) == len(programs), "programs have distinct names"

    def on(self, event: Event, now_s: float) -> list[Action]:
        """The one place where states change."""
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
            case _:
                assert_never(event)
        if self._stopping:
            actions += self._drain(now_s)
        return actions

    @property
    def next_due_s(self) -> float | None:
        """When the next Tick is wanted; None: only other events matter."""
        due_s = min(
            (each.due_s for each in self._children.values() if each.state in ("waiting", "stopping")), default=inf
        )
        return due_s if due_s < inf else None

    @property
    def stopping(self) -> bool:
        """Whether nothing will be started any more."""
        return self._stopping

    def state(self, name: str) -> State:
        """Where one child is."""
        return self._children[name].state

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        states = {child.state for child in self._children.values()}
        assert not self._finished or states <= {"ended"}
        if not self._stopping:
            for child in self._children.values():
                assert child.state in ("waiting", "running") or (child.state == "ended" and not child.program.needed)
            return
        assert "waiting" not in states, "nothing waits for a start while stopping"
        drained = {child.program.stage for child in self._children.values() if child.state in ("stopping",)}
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
        if status == CONFIG_STATUS and self._hopeless(child):
            if child.program.needed:
                self._status, self._stopping = 1, True
            return [Misconfigured(name, child.program.needed)]
        if now_s - child.started_s >= STEADY_S:
            child.delay_s = FIRST_DELAY_S
        delay_s = child.delay_s
        child.state, child.due_s = "waiting", now_s + delay_s
        child.delay_s = min(2 * delay_s, LAST_DELAY_S)
        return [Restarting(name, status, delay_s)]

    def _hopeless(self, child: _Child) -> bool:
        """Whether it is given up as its configuration is wrong. What has served once was well configured: what keeps a
        program from starting again may go away, and what serves goes on. What is not needed has one chance."""
        return not self._served or (not child.program.needed and child.starts == 1)

    def _due(self, child: _Child, now_s: float) -> list[Action]:
        if child.state == "waiting" and now_s >= child.due_s:
            return self._start(child, now_s)
        if child.state == "stopping" and now_s >= child.due_s:
            child.state = "killed"
            return [Kill(child.program.name)]
        return []

    def _drain(self, now_s: float) -> list[Action]:
        """Ask the lowest stage that still lives to end; Finished when none is left."""
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
