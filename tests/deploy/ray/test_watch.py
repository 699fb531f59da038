"""deploy/local/ray/watch.py: what Ray is asked for, what is said, and in which order all end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from deploy.local.ray.order import Order
from deploy.local.ray.watch import (
    PATIENCE_S,
    RETRY_S,
    Action,
    ActorReport,
    AddOrder,
    Create,
    Drain,
    Drained,
    Lost,
    Notice,
    Reported,
    SayReady,
    Silent,
    Watch,
)
from deploy.local.stack.supervise import AllEnded, Kill, Remove, Stop, Tick

FRONTEND = Order("frontend", (), {}, 0, 40.0, node="head", service="frontend")
WORKERS = [Order(f"worker-{index}", (), {}, 1, 40.0, cpus=1, service="worker") for index in range(2)]
ROUTER = Order("router", (), {}, 2, 40.0, node="head", service="router")
NATS = Order("nats", (), {}, 3, 5.0, server="nats", node="head")
STORE = Order("kvbm", (), {}, 2, 40.0, service="kvbm", owns_pool=True, needed=False)
ORDERS = (FRONTEND, *WORKERS, ROUTER, NATS)


def report(name: str, node: str = "head", pid: int = 7, status: int | None = None, *said: str) -> Reported:
    told = ActorReport(node, f"address of {node}", pid, "", status, list(said))
    return Reported(name, told, healthy=status is None)


def begun(orders: Sequence[Order] = ORDERS, store: Order | None = STORE) -> Watch:
    watch = Watch(orders, store)
    assert watch.on(Tick(), 0.0) == [Create(order) for order in orders]
    return watch


def running(store: Order | None = STORE) -> Watch:
    watch = begun(ORDERS, store)
    for order in ORDERS:
        watch.on(report(order.name, order.node or "other"), 1.0)
        watch.validate()
    return watch


def test_requests_are_served_once_all_frontends_are_ready() -> None:
    watch = begun((FRONTEND, replace(FRONTEND, name="frontend-1"), ROUTER))
    assert watch.on(report("frontend"), 1.0) == []
    assert watch.on(report("router"), 1.0) == []
    assert watch.on(report("frontend-1"), 1.0) == [SayReady()]
    assert watch.on(report("frontend-1"), 2.0) == []


def test_each_node_with_a_worker_gets_one_kvbm() -> None:
    watch = begun()
    here = replace(STORE, name="kvbm-node-of-", node="node-of-worker-0")
    assert watch.on(report("worker-0", "node-of-worker-0"), 1.0) == [Create(here)]
    assert watch.on(report("worker-1", "node-of-worker-0"), 1.0) == []
    assert watch.on(report("worker-1", "elsewhere"), 2.0) == [
        Create(replace(STORE, name="kvbm-elsewher", node="elsewhere"))
    ]
    watch.validate()


def test_a_kvbm_that_ray_gave_up_is_added_again_only_where_a_worker_reports() -> None:
    watch = running()
    assert watch.on(Lost("kvbm-other", "its node died"), 2.0) == []
    watch.validate()
    assert watch.on(report("worker-0", "head"), 3.0) == [Create(replace(STORE, name="kvbm-head", node="head"))]
    assert watch.on(report("worker-1", "other"), 3.0) == [Create(replace(STORE, name="kvbm-other", node="other"))]


def test_a_fleet_without_a_block_store_has_no_kvbm() -> None:
    watch = begun(store=None)
    assert watch.on(report("worker-0", "other"), 1.0) == []


def test_what_ray_starts_again_is_said_when_it_ends_and_when_it_is_ready() -> None:
    watch = running()
    assert watch.on(report("worker-0", "other", 7, -9), 2.0) == [
        Notice("worker-0 ended at address of other (SIGKILL); Ray starts it again")
    ]
    assert watch.on(report("worker-0", "other", 7, -9), 2.5) == [], "once for each run"
    assert watch.on(Silent("worker-0"), 3.0) == []
    assert watch.on(report("worker-0", "head", 8), 9.0)[0] == Notice(
        "worker-0 has started again at address of head and is ready"
    )
    assert watch.on(report("worker-0", "head", 8, 1, "first", "out of memory"), 10.0) == [
        Notice("worker-0 ended at address of head (status 1); Ray starts it again: out of memory")
    ]


def test_a_program_that_ended_before_it_was_ready_has_started_again_too() -> None:
    watch = begun()
    watch.on(replace(report("router", pid=7), healthy=False), 1.0)
    watch.on(report("router", "head", 7, -9), 2.0)
    assert watch.on(report("router", pid=8), 3.0) == [
        Notice("router has started again at address of head and is ready")
    ]


def test_an_actor_that_was_only_slow_to_answer_has_not_started_again() -> None:
    watch = running()
    assert watch.on(Silent("worker-0"), 2.0) == []
    assert watch.on(report("worker-0", "other"), 3.0) == []


def test_that_ray_finds_no_node_is_said_once_with_what_is_needed() -> None:
    watch = begun((replace(WORKERS[0], gpus=1),))
    assert watch.on(Silent("worker-0"), PATIENCE_S - 1) == []
    assert watch.on(Silent("worker-0"), PATIENCE_S) == [
        Notice("worker-0 does not answer: Ray looks for a node with 1 GPU and 1 CPU free, or starts it")
    ]
    assert watch.on(Silent("worker-0"), PATIENCE_S + 9) == []


def test_an_actor_that_ray_gave_up_is_asked_for_again() -> None:
    watch = running()
    assert watch.on(Lost("worker-1", "Headrace is not installed"), 2.0) == [
        Notice("worker-1: Headrace is not installed")
    ]
    assert watch.on(Tick(), 2.0 + RETRY_S - 0.1) == []
    assert watch.on(Tick(), 2.0 + RETRY_S) == [Create(WORKERS[1])]


def test_what_cannot_work_as_configured_stops_all_before_they_have_served() -> None:
    watch = begun()
    for name in ("worker-0", "nats", "router"):
        watch.on(report(name), 1.0)
    actions = watch.on(report("worker-0", "head", 7, 2, "no such model"), 2.0)
    assert actions[0] == Notice("error: worker-0 at address of head cannot work as configured:\n  no such model")
    assert Kill("frontend") in actions, "it has never reported, so that there is nothing to drain"
    ended = end_all(watch, actions)
    assert ended == [Notice("error: worker-0: no such model"), AllEnded(1)]


def test_what_cannot_work_any_more_goes_on_once_they_have_served() -> None:
    watch = running()
    [said] = watch.on(report("worker-0", "other", 7, 2, "no such model"), 2.0)
    assert said == Notice("worker-0 ended at address of other (status 2); Ray starts it again: no such model")
    assert not watch.stopping


def test_a_kvbm_that_is_not_needed_is_left_out_for_good_where_it_cannot_work() -> None:
    watch = running()
    watch.on(report("kvbm-other", "other"), 2.0)
    assert watch.on(report("kvbm-other", "other", 9, 2, "no room"), 3.0) == [
        Notice("without kvbm-other at address of other: no room"),
        Kill("kvbm-other"),
    ]
    assert watch.on(report("worker-0", "other"), 4.0) == []


EXTRA = replace(WORKERS[0], name="worker-2")


def test_a_worker_that_is_added_is_created_and_one_that_is_removed_drains_and_is_forgotten() -> None:
    watch = running(None)
    assert watch.on(AddOrder(EXTRA), 2.0) == []
    assert watch.on(Tick(), 2.1) == [Create(EXTRA)]
    watch.on(report("worker-2", "other"), 3.0)
    assert watch.on(Remove("worker-2"), 4.0) == [Drain(EXTRA)]
    assert watch.state("worker-2") == "leaving"
    assert watch.on(Remove("worker-2"), 4.1) == [], "it leaves already"
    assert watch.on(Silent("worker-2"), 4.2) == []
    watch.on(Drained("worker-2"), 5.0)
    assert watch.state("worker-2") == "ended"
    watch.on(AddOrder(EXTRA), 6.0)
    assert watch.on(Tick(), 6.1) == [Create(EXTRA)], "its name is free again"


def test_an_added_worker_for_which_ray_finds_no_node_is_killed_when_it_is_removed() -> None:
    watch = running(None)
    watch.on(AddOrder(EXTRA), 2.0)
    watch.on(Tick(), 2.0)
    assert watch.on(Remove("worker-2"), 3.0) == [Kill("worker-2")]
    watch.on(AddOrder(EXTRA), 4.0)
    assert watch.on(Remove("worker-2"), 4.0) == [], "Ray was not asked yet"
    assert watch.on(Tick(), 5.0) == []


def test_why_an_added_worker_cannot_work_is_known_until_it_can() -> None:
    watch = running(None)
    watch.on(AddOrder(EXTRA), 2.0)
    watch.on(Tick(), 2.0)
    watch.on(report("worker-2", "other", 8, 2, "no such model"), 3.0)
    watch.on(report("worker-0", "other", 7, 2, "no such model"), 3.0)
    assert watch.wrong("worker-2") == "no such model"
    assert watch.wrong("worker-0") == "", "it was not added: Ray starts it again"
    watch.on(report("worker-2", "other", 9), 4.0)
    assert watch.wrong("worker-2") == ""
    assert not watch.stopping


def test_an_added_worker_that_cannot_work_stops_nothing_before_requests_are_served_either() -> None:
    watch = begun(store=None)
    watch.on(AddOrder(EXTRA), 1.0)
    watch.on(Tick(), 1.0)
    watch.on(report("worker-2", "other", 8, 2, "no such model"), 2.0)
    assert watch.wrong("worker-2") == "no such model"
    assert not watch.stopping


def test_a_worker_that_leaves_while_all_stop_does_not_hold_up_the_stages() -> None:
    watch = running(None)
    watch.on(Remove("worker-0"), 2.0)
    assert watch.on(Stop(), 2.1) == [Drain(FRONTEND)]
    assert watch.on(AddOrder(EXTRA), 2.2) == [], "nothing is added any more"
    watch.on(Drained("worker-0"), 2.3)
    watch.validate()
    assert watch.on(Drained("frontend"), 3.0) == [Drain(WORKERS[1])]


def end_all(watch: Watch, actions: list[Action]) -> list[Action]:
    """Let all that drains end, and return the actions of the last end."""
    while drained := [action.order.name for action in actions if isinstance(action, Drain)]:
        actions = [action for name in drained for action in watch.on(Drained(name), 9.0)]
        watch.validate()
    return actions


def test_stages_drain_one_after_the_other_with_the_servers_last() -> None:
    watch = running(None)
    actions = watch.on(Stop(), 2.0)
    order: list[str] = []
    while drained := [action.order.name for action in actions if isinstance(action, Drain)]:
        order += [" ".join(drained)]
        actions = [action for name in drained for action in watch.on(Drained(name), 3.0)]
    assert order == ["frontend", "worker-0 worker-1", "router", "nats"]
    assert actions == [AllEnded(0)]


def test_a_second_stop_kills_all_that_is_left() -> None:
    watch = running(None)
    watch.on(Stop(), 2.0)
    assert watch.on(Stop(), 2.1) == [*(Kill(order.name) for order in ORDERS), AllEnded(0)]
    assert watch.on(Drained("frontend"), 3.0) == []


class Watching(RuleBasedStateMachine):
    """Ray does to the actors what it likes; the shell's part is a set of those that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Watch(ORDERS, STORE)
        self.now_s = 0.0
        self.actors: dict[str, Order] = {}
        self.draining: set[str] = set()
        self.finished: list[int] = []
        self.pids = 1
        self.do(self.watch.on(Tick(), 0.0))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Create(order):
                    assert order.name not in self.actors
                    self.actors[order.name] = order
                case Drain(order):
                    assert order.name in self.actors
                    self.draining.add(order.name)
                case Kill(name):
                    del self.actors[name]
                    self.draining.discard(name)
                case AllEnded(status):
                    assert not self.actors
                    self.finished.append(status)
        self.watch.validate()

    @precondition(lambda self: self.actors)
    @rule(
        choice=st.data(),
        status=st.sampled_from((None, None, None, 0, 1, 2, -9)),
        node=st.sampled_from(("head", "other")),
    )
    def an_actor_reports(self, choice: st.DataObject, status: int | None, node: str) -> None:
        name = choice.draw(st.sampled_from(sorted(self.actors)))
        self.pids += status is None
        self.do(self.watch.on(report(name, self.actors[name].node or node, self.pids, status), self.now_s))

    @precondition(lambda self: self.actors)
    @rule(choice=st.data(), lost=st.booleans())
    def an_actor_does_not_answer(self, choice: st.DataObject, lost: bool) -> None:
        name = choice.draw(st.sampled_from(sorted(self.actors)))
        if lost and name not in self.draining:
            del self.actors[name]
            self.do(self.watch.on(Lost(name, "its node died"), self.now_s))
        else:
            self.do(self.watch.on(Silent(name), self.now_s))

    @precondition(lambda self: self.draining)
    @rule(choice=st.data())
    def an_actor_has_drained(self, choice: st.DataObject) -> None:
        name = choice.draw(st.sampled_from(sorted(self.draining)))
        self.draining.discard(name)
        del self.actors[name]
        self.do(self.watch.on(Drained(name), self.now_s))

    @rule(passed_s=st.sampled_from((0.1, 1.0, 40.0)))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.do(self.watch.on(Tick(), self.now_s))

    @rule(name=st.sampled_from(("worker-0", "worker-1", "worker-2", "worker-3")), more=st.booleans())
    def another_number_of_workers_is_wanted(self, name: str, more: bool) -> None:
        if more and self.watch.state(name) == "ended" and not self.watch.stopping:
            self.do(self.watch.on(AddOrder(replace(EXTRA, name=name)), self.now_s))
        elif not more:
            self.do(self.watch.on(Remove(name), self.now_s))

    @rule()
    def the_user_stops(self) -> None:
        self.do(self.watch.on(Stop(), self.now_s))

    @invariant()
    def the_end_is_reported_once_and_only_when_nothing_is_left(self) -> None:
        assert len(self.finished) == (self.watch.stopping and not self.actors)


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=60, stateful_step_count=40)
