"""deploy/local/stack/supervise.py: who is started again, when, and in which order all end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deploy.local.stack.supervise import (
    LAST_DELAY_S,
    LATE_S,
    STEADY_S,
    Action,
    Add,
    AllEnded,
    Begin,
    Exited,
    Kill,
    Misconfigured,
    Program,
    Remove,
    Restarting,
    Serving,
    Start,
    Stop,
    Supervisor,
    Terminate,
    Tick,
)

PROGRAMS = (
    Program("frontend", 0, 5.0),
    Program("worker-0", 1, 5.0),
    Program("worker-1", 1, 5.0),
    Program("router", 2, 5.0),
    Program("kvbm", 2, 5.0, needed=False),
    Program("nats", 3, 5.0),
)


def begun() -> Supervisor:
    supervisor = Supervisor(PROGRAMS)
    supervisor.on(Begin(), 0.0)
    return supervisor


def test_everything_starts_at_once() -> None:
    assert Supervisor(PROGRAMS).on(Begin(), 0.0) == [Start(program.name) for program in PROGRAMS]


ADDED = Program("added", 1, 5.0, needed=False)


def test_a_program_is_added_and_removed_while_the_others_run() -> None:
    supervisor = begun()
    assert supervisor.on(Add(ADDED), 1.0) == [Start("added")]
    assert supervisor.on(Exited("added", 1), 2.0) == [Restarting("added", 1, 0.5)]
    assert supervisor.on(Tick(), 2.5) == [Start("added")]
    assert supervisor.on(Remove("added"), 3.0) == [Terminate("added")]
    supervisor.validate()
    assert supervisor.knows("added")
    assert supervisor.on(Tick(), 8.0) == [Kill("added")]
    assert supervisor.on(Exited("added", -9), 8.1) == []
    supervisor.validate()
    assert not supervisor.knows("added")
    assert supervisor.on(Add(ADDED), 9.0) == [Start("added")]
    supervisor.on(Exited("added", 1), 9.1)
    assert supervisor.on(Remove("added"), 9.2) == [], "it waited for its restart"
    assert not supervisor.knows("added")


def test_a_program_that_was_there_from_the_start_is_removed_alone() -> None:
    supervisor = begun()
    supervisor.on(Serving(), 1.0)
    assert supervisor.on(Remove("worker-1"), 2.0) == [Terminate("worker-1")]
    supervisor.validate()
    assert supervisor.on(Exited("worker-1", 0), 3.0) == []
    assert not supervisor.knows("worker-1")
    assert supervisor.on(Add(Program("worker-1", 1, 5.0, needed=False)), 4.0) == [Start("worker-1")]


def test_an_added_program_with_a_wrong_configuration_has_ended_whatever_served_before() -> None:
    supervisor = begun()
    supervisor.on(Serving(), 1.0)
    supervisor.on(Add(ADDED), 2.0)
    supervisor.on(Exited("added", -9), 3.0)
    supervisor.on(Tick(), 3.5)
    assert supervisor.on(Exited("added", 2), 4.0) == [Misconfigured("added", needed=False)]
    supervisor.validate()
    assert supervisor.state("added") == "ended"
    assert supervisor.on(Remove("added"), 5.0) == []
    assert not supervisor.knows("added")


def test_a_program_that_leaves_while_all_is_stopped_holds_nothing_up() -> None:
    supervisor = Supervisor((Program("frontend", 0, 5.0),))
    supervisor.on(Begin(), 0.0)
    supervisor.on(Add(ADDED), 1.0)
    supervisor.on(Remove("added"), 2.0)
    assert supervisor.on(Stop(), 2.5) == [Terminate("frontend")]
    supervisor.validate()
    assert supervisor.on(Exited("frontend", 0), 3.0) == []
    assert supervisor.on(Exited("added", 0), 3.5) == [AllEnded(0)]
    assert supervisor.on(Add(ADDED), 4.0) == [], "nothing starts any more"


LATER = Program("later", 2, 5.0, late=True)


def test_a_late_program_starts_a_moment_after_the_others_serve() -> None:
    supervisor = Supervisor((LATER, Program("nats", 3, 5.0)))
    assert supervisor.on(Begin(), 100.0) == [Start("nats")]
    supervisor.validate()
    assert supervisor.next_due_s is None
    assert supervisor.on(Tick(), 1000.0) == []
    assert supervisor.on(Serving(), 1000.0) == []
    assert supervisor.next_due_s == 1000.0 + LATE_S
    assert supervisor.on(Tick(), 1000.0 + LATE_S) == [Start("later")]
    assert supervisor.on(Exited("later", 1), 1002.0) == [Restarting("later", 1, 0.5)], "only the first start is late"


def test_a_late_program_is_not_started_any_more_once_all_is_stopped() -> None:
    supervisor = Supervisor((LATER, Program("nats", 3, 5.0)))
    supervisor.on(Begin(), 100.0)
    supervisor.on(Serving(), 101.0)
    assert supervisor.on(Stop(), 101.5) == [Terminate("nats")]
    assert supervisor.on(Tick(), 103.0) == []
    assert supervisor.on(Serving(), 103.0) == []
    assert supervisor.on(Exited("nats", 0), 103.0) == [AllEnded(0)]


def test_a_crashed_program_starts_again_after_its_back_off() -> None:
    supervisor = begun()
    assert supervisor.on(Exited("router", -9), 1.0) == [Restarting("router", -9, 0.5)]
    assert supervisor.next_due_s == 1.5
    assert supervisor.on(Tick(), 1.4) == []
    assert supervisor.on(Tick(), 1.5) == [Start("router")]
    assert supervisor.next_due_s is None


def test_the_back_off_doubles_up_to_its_bound() -> None:
    supervisor, now_s, delays_s = begun(), 0.0, []
    for _ in range(8):
        (restarting,) = supervisor.on(Exited("router", 1), now_s)
        assert isinstance(restarting, Restarting)
        delays_s.append(restarting.delay_s)
        now_s += restarting.delay_s
        assert supervisor.on(Tick(), now_s) == [Start("router")]
    assert delays_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]


def test_a_steady_run_starts_the_back_off_afresh() -> None:
    supervisor = begun()
    supervisor.on(Exited("router", 1), 0.0)
    supervisor.on(Tick(), 0.5)
    assert supervisor.on(Exited("router", 1), 0.5 + STEADY_S) == [Restarting("router", 1, 0.5)]


def test_a_program_that_ends_without_being_asked_starts_again_even_with_status_0() -> None:
    assert begun().on(Exited("router", 0), 0.0) == [Restarting("router", 0, 0.5)]


def test_a_wrong_configuration_is_not_tried_again_and_ends_the_whole_with_status_1() -> None:
    supervisor = begun()
    assert supervisor.on(Exited("worker-0", 2), 1.0) == [Misconfigured("worker-0", needed=True), Terminate("frontend")]
    assert supervisor.on(Exited("frontend", 0), 1.0) == [Terminate("worker-1")]
    assert supervisor.on(Exited("worker-1", 2), 1.0) == [Terminate("router"), Terminate("kvbm")]
    assert supervisor.on(Exited("router", 0), 1.0) == []
    assert supervisor.on(Exited("kvbm", 0), 1.0) == [Terminate("nats")]
    assert supervisor.on(Exited("nats", 0), 1.0) == [AllEnded(1)]


def test_what_the_others_can_do_without_is_not_tried_again_either_and_ends_nothing_else() -> None:
    supervisor = begun()
    assert supervisor.on(Exited("kvbm", 2), 1.0) == [Misconfigured("kvbm", needed=False)]
    supervisor.validate()
    assert supervisor.state("kvbm") == "ended"
    assert supervisor.on(Tick(), 1000.0) == []
    assert supervisor.on(Stop(), 1000.0) == [Terminate("frontend")]
    for name in ("frontend", "worker-0", "worker-1", "router"):
        supervisor.on(Exited(name, 0), 1000.0)
    assert supervisor.on(Exited("nats", 0), 1000.0) == [AllEnded(0)]


def test_a_wrong_configuration_after_all_has_served_ends_nothing_else_and_is_tried_again() -> None:
    supervisor = begun()
    supervisor.on(Serving(), 1.0)
    assert supervisor.on(Exited("worker-0", 2), 2.0) == [Restarting("worker-0", 2, 0.5)]
    supervisor.validate()
    assert supervisor.on(Tick(), 2.5) == [Start("worker-0")]
    assert supervisor.on(Exited("worker-0", 2), 3.0) == [Restarting("worker-0", 2, 1.0)], "and backs off"


def test_what_the_others_can_do_without_is_tried_again_where_it_has_started_before_all_served() -> None:
    supervisor = begun()
    supervisor.on(Exited("kvbm", -9), 1.0)
    supervisor.on(Serving(), 1.2)
    supervisor.on(Tick(), 1.5)
    assert supervisor.on(Exited("kvbm", 2), 2.0) == [Restarting("kvbm", 2, 1.0)]


def test_a_late_program_that_the_others_can_do_without_is_not_tried_again_where_its_first_start_fails() -> None:
    supervisor = Supervisor((Program("later", 2, 5.0, needed=False, late=True), Program("nats", 3, 5.0)))
    supervisor.on(Begin(), 100.0)
    supervisor.on(Serving(), 101.0)
    supervisor.on(Tick(), 101.0 + LATE_S)
    assert supervisor.on(Exited("later", 2), 103.0) == [Misconfigured("later", needed=False)]


def test_stages_drain_one_after_another() -> None:
    supervisor = begun()
    assert supervisor.on(Stop(), 0.0) == [Terminate("frontend")]
    assert supervisor.on(Exited("frontend", 0), 1.0) == [Terminate("worker-0"), Terminate("worker-1")]
    assert supervisor.on(Exited("worker-1", 0), 1.0) == []
    assert supervisor.on(Exited("worker-0", 0), 1.0) == [Terminate("router"), Terminate("kvbm")]
    assert supervisor.on(Exited("router", 0), 1.0) == []
    assert supervisor.on(Exited("kvbm", 0), 1.0) == [Terminate("nats")]
    assert supervisor.on(Exited("nats", 0), 1.0) == [AllEnded(0)]


def test_a_program_that_does_not_drain_in_time_is_killed() -> None:
    supervisor = begun()
    supervisor.on(Stop(), 0.0)
    assert supervisor.next_due_s == 5.0
    assert supervisor.on(Tick(), 4.9) == []
    assert supervisor.on(Tick(), 5.0) == [Kill("frontend")]
    assert supervisor.on(Exited("frontend", -9), 5.1) == [Terminate("worker-0"), Terminate("worker-1")]


def test_a_program_that_waits_for_its_restart_is_not_started_while_stopping() -> None:
    supervisor = begun()
    supervisor.on(Exited("nats", 1), 0.0)
    supervisor.on(Stop(), 0.1)
    assert supervisor.state("nats") == "ended"
    assert supervisor.on(Tick(), 1.0) == []


def test_a_second_stop_kills_everything_at_once() -> None:
    supervisor = begun()
    supervisor.on(Stop(), 0.0)
    assert supervisor.on(Stop(), 0.1) == [Kill(program.name) for program in PROGRAMS]
    assert supervisor.on(Stop(), 0.2) == []


class Supervision(RuleBasedStateMachine):
    """Children that end whenever they like; the shell's part is a set of who lives."""

    def __init__(self) -> None:
        super().__init__()
        self.supervisor = Supervisor((*PROGRAMS, LATER))
        self.now_s = 0.0
        self.alive: set[str] = set()
        self.finished: list[int] = []
        self.do(self.supervisor.on(Begin(), 0.0))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(name):
                    assert name not in self.alive
                    self.alive.add(name)
                case Terminate(name) | Kill(name):
                    assert name in self.alive
                case Restarting(_, _, delay_s):
                    assert 0 < delay_s <= LAST_DELAY_S
                case Misconfigured(name, _):
                    assert name not in self.alive
                case AllEnded(status):
                    self.finished.append(status)
        self.supervisor.validate()

    @precondition(lambda self: self.alive)
    @rule(status=st.sampled_from((0, 1, 1, 1, 2, -9)), choice=st.data())
    def a_child_ends(self, status: int, choice: st.DataObject) -> None:
        name = choice.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(name)
        self.do(self.supervisor.on(Exited(name, status), self.now_s))

    @rule(passed_s=st.sampled_from((0.1, 1.0, 40.0)))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.do(self.supervisor.on(Tick(), self.now_s))

    @rule()
    def all_serves(self) -> None:
        self.do(self.supervisor.on(Serving(), self.now_s))

    @rule()
    def someone_stops(self) -> None:
        self.do(self.supervisor.on(Stop(), self.now_s))

    @rule(adds=st.booleans())
    def one_is_added_or_removed(self, adds: bool) -> None:
        if adds != self.supervisor.knows("added"):
            self.do(self.supervisor.on(Add(ADDED) if adds else Remove("added"), self.now_s))

    @invariant()
    def a_child_is_running_waiting_or_the_whole_stops(self) -> None:
        assert self.supervisor.knows("added") or "added" not in self.alive
        for program in (*PROGRAMS, LATER, *([ADDED] if self.supervisor.knows("added") else [])):
            lives = self.supervisor.state(program.name) in ("running", "stopping", "killed")
            assert lives == (program.name in self.alive)

    def teardown(self) -> None:
        self.do(self.supervisor.on(Stop(), self.now_s))
        while self.alive:
            name = min(self.alive, key=lambda name: self.supervisor.state(name) == "running")
            assert self.supervisor.state(name) != "running", "a stage is always being drained"
            self.alive.discard(name)
            self.do(self.supervisor.on(Exited(name, 0), self.now_s))
        assert len(self.finished) == 1


TestSupervision = Supervision.TestCase
TestSupervision.settings = settings(max_examples=60, stateful_step_count=30)
