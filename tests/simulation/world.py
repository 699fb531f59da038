"""A seed's world from its first moment to its last.

    storm      requests come, faults befall, messages travel badly          `plan.storm_s`
    quiet      every fault is over; the world has QUIET_S to become right
    after      each frontend is asked once more, and must answer
    end        every process is stopped, and leaves nothing behind

All of it is one task on a loop that owns time (clock.py), so that a seed runs the same each time.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, assert_never

import msgspec

from services.frontend.requests.session import Session
from services.router.selection.pairs import WorkerPair
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus, MemorySubscription
from shared.discovery.memory import MemoryStore
from shared.errors import RequestTimeout
from shared.messages.cards import Role, ServiceName
from tests.fakes.memory_sockets import MemorySockets
from tests.simulation.clients import Answer, ask, judge
from tests.simulation.clock import Deadlock, Livelock, SimulatedLoop
from tests.simulation.events import KeptEvents
from tests.simulation.invariants import troubles, violations
from tests.simulation.plan import Aim, Fault, Moment, Plan, Request, request, role_of_replacement
from tests.simulation.process import NAMESPACE, Process, make_pool
from tests.simulation.weather import StormyWeather

TTL_S = 1.0
"""Seconds of leases."""
QUIET_S = 20.0
"""Longer than any deadline, back-off and interval in process.py, one after the other."""
LOOK_S = 0.25
AIM_S = 0.001
"""Between two looks for the moment of a fault."""
END_S = 10.0
LATE_S = 0.2
"""How long after its deadline a request may still end, in quiet as in storm."""
HEALED_S = 5.0
"""After so much quiet no request is stuck any more: it is not that long before it gets something, and then more."""
FREED_S = 0.6
"""Under a clear sky, after so long nothing is left of a request whose client went."""


class World:
    """One run of one plan. `wrong` grows by a line for each thing that should not have been."""

    def __init__(self, loop: SimulatedLoop, plan: Plan, tell: Callable[[str], None]) -> None:
        """`tell` gets a line for each message, fault and answer."""
        self.wrong: list[str] = []
        self.processes: list[Process] = []
        """All that ever lived."""
        self.answers: list[Answer] = []
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By the request's name."""
        self._loop = loop
        self._plan = plan
        self._tell = tell
        self._draw = Random(f"world {plan.seed}")
        contexts: dict[str, Context] = {}
        self._contexts = contexts
        self.weather = StormyWeather(loop, plan.seed, plan.skies, contexts, tell)
        self._kept_events = KeptEvents(NAMESPACE, self.weather, plan.sizes.ring_batches)
        self._broker = RememberingBroker(
            self.weather, Random(f"broker {plan.seed}"), plan.skies.torn, self._kept_events
        )
        self._store = MemoryStore(ttl_s=TTL_S, delivery=self.weather)
        self._quiet = asyncio.Event()
        self._quiet_s = 0.0
        """When it became quiet."""
        self._nats_away = False
        self._replaced: set[str] = set()
        """Instances that ended, or are ending, and have a replacement."""
        self._first: set[str] = set()
        """The first worker and those in its place."""
        self.aimed: Counter[Aim] = Counter()
        """The faults that befell the moment that they waited for."""
        self._pool = ""
        """The directory of the kvbm's."""
        self._sockets = MemorySockets()
        loop.set_exception_handler(self._on_exception)

    async def run(self) -> None:
        """All of it."""
        if not self._plan.sizes.pool_slots:
            await self._run()
            return
        with TemporaryDirectory(prefix="headrace-simulated-pool-") as pool:
            self._pool = pool
            make_pool(Path(pool), self._plan.sizes.pool_slots)
            await self._run()

    async def _run(self) -> None:
        plan = self._plan
        workers = len(plan.roles)
        counts: dict[ServiceName, int] = {"worker": workers, "router": plan.routers, "frontend": plan.frontends}
        if self._pool:
            counts["kvbm"] = 1
        beginning: list[ServiceName] = [service for service in counts for _ in range(counts[service])]
        self._draw.shuffle(beginning)
        roles = iter(plan.roles)
        for service in beginning:
            self._start(service, next(roles) if service == "worker" else "aggregated")
        try:
            async with asyncio.TaskGroup() as storm:
                for fault in plan.faults:
                    storm.create_task(self._befall(fault))
                for one in plan.requests:
                    storm.create_task(self._ask_later(one))
                await asyncio.sleep(plan.storm_s)
                self._calm()
            await self._settle("after the storm")
            await self._ask_again()
            await self._settle("after the last requests")
            self.wrong += [line for answer in self.answers if (line := self._judge(answer))]
            self.wrong += [line for process in self.processes for line in process.wrong]
            if plan.clear:
                self.wrong += troubles(self.processes)
        finally:
            await self._end()

    # --- who is there

    def _start(self, service: ServiceName, role: Role = "aggregated", first: bool = False) -> None:
        """`first`: in place of the first worker, which always decodes."""
        number = sum(process.service == service for process in self.processes) + 1
        instance = f"{service[0]}{number}"
        process = Process(
            *(self._loop, self._broker, self._store, service, instance),
            Random(f"{instance} {self._plan.seed}"),
            sizes=self._plan.sizes,
            sockets=self._sockets,
            kept_events=self._kept_events,
            pool=self._pool,
            role=role,
        )
        if service == "worker" and (number == 1 or first):
            self._first.add(instance)
        self._tell(f"{instance} starts" + ("" if role == "aggregated" else f" as {role}"))
        self._contexts[instance] = process.context
        self.processes.append(process)
        process.main.add_done_callback(lambda _: self._hang_up(process))
        if self._nats_away:
            self._broker.disconnect(process.bus)

    def _alive(self, service: ServiceName | None = None) -> list[Process]:
        return [
            process
            for process in self.processes
            if process.state in ("running", "frozen") and service in (None, process.service)
        ]

    # --- storm

    async def _befall(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        if fault.aim is not None:
            await self._befall_half(fault, fault.aim)
            return
        only: ServiceName | None = "worker" if fault.kind in ("kill engine", "freeze engine", "mute events") else None
        among = self._alive(only)
        if among:
            await self._befall_one(fault, among[fault.target % len(among)])

    async def _befall_one(self, fault: Fault, target: Process) -> None:
        self._tell(f"fault: {fault.kind} {target.instance} for {fault.for_s:g} s")
        undo = self._begin(fault, target)
        if undo is not None:
            await self._pass(fault.for_s)
            undo()

    async def _befall_half(self, fault: Fault, aim: Aim) -> None:
        """Waits for the moment, if it comes before it is quiet."""
        while not self._quiet.is_set():
            if (target := self._half(aim)) is not None:
                self._tell(f"aimed at {aim.half} when {aim.moment}")
                self.aimed[aim] += 1
                await self._befall_one(fault, target)
                return
            await self._pass(AIM_S)

    def _half(self, aim: Aim) -> Process | None:
        """The process of a request that is at this moment of a hand-over. None if no request is."""
        for session in (
            stream.session
            for process in self._alive("frontend")
            if process.frontend is not None
            for stream in process.frontend._running.values()
        ):
            target = self._part(session, aim)
            if target is not None:
                return target
        return None

    def _part(self, session: Session, aim: Aim) -> Process | None:
        """The process that a request needs for its hand-over, if it is at this moment of it."""
        if session._decoder is not None:
            moment: Moment = "first token" if session.prefilled else "prompt"
            prefill, decode = session.instance, session._decoder[0]
        elif session.attempt > 1 and session.instance and self._process(session.instance).role == "decode":
            moment, prefill, decode = "taken over", "", session.instance
        else:
            return None
        if moment != aim.moment:
            return None
        match aim.half:
            case "kvbm":
                needed = self._alive("kvbm")
            case "prefill" if not prefill:  # its part is over
                needed = [process for process in self._alive("worker") if process.role == "prefill"]
            case half:
                name = prefill if half == "prefill" else decode
                needed = [process for process in self._alive("worker") if process.instance == name]
        return next(iter(needed), None)

    def _begin(self, fault: Fault, target: Process) -> Callable[[], None] | None:
        """Let it befall; what ends it."""
        match fault.kind:
            case "kill":
                target.kill()
                self._hang_up(target)
                return self._replacement(target)
            case "stop":
                target.stop()
                return self._replacement(target)
            case "freeze":
                target.freeze()
                return target.thaw
            case "kill engine":
                target.kill_engine()
            case "freeze engine":
                return target.freeze_engine()
            case "lose NATS":
                self._broker.disconnect(target.bus)
                return partial(self._reconnect, target)
            case "lose all NATS":
                self._nats_away = True
                self._kept_events.restart()
                for process in self._alive():
                    self._broker.disconnect(process.bus)
                return self._find_nats
            case "lose discovery":
                self._store.outage()
                return self._store.recover
            case "wipe discovery":
                if not self._store.away:
                    self._store.wipe()
            case "expire lease":
                if not self._store.away:
                    target.expire()
            case "mute events":
                target.mute(muted=True)
                return partial(target.mute, muted=False)
            case "part":
                self.weather.parted.add(target.instance)
                return partial(self.weather.parted.discard, target.instance)
            case "set the clock":
                target.wall_offset_s += fault.for_s * self._draw.choice((-1, 1))
            case _:
                assert_never(fault.kind)
        return None

    def _replacement(self, ending: Process) -> Callable[[], None] | None:
        """The start of another process in place of `ending`: once, though it may be stopped twice or killed while it
        drains. Two kvbm would wait for one pool.
        """
        if ending.instance in self._replaced:
            return None
        self._replaced.add(ending.instance)
        if ending.service != "worker":
            return partial(self._start, ending.service)
        number = sum(process.service == "worker" for process in self.processes) + 1
        first = ending.instance in self._first
        role = ending.role
        if self._plan.apart:
            role = role_of_replacement(self._plan.seed, number, ending.role, decodes=first)
        return partial(self._start, ending.service, role, first)

    def _hang_up(self, process: Process) -> None:
        """The process is no more, and with it the connections of its clients."""
        for answer in self.answers:
            if answer.frontend == process.instance and answer.end is None:
                answer.end, answer.ended_s = "reset", self._loop.time()
                self._asking[answer.request.name].cancel()

    def _find_nats(self) -> None:
        self._nats_away = False
        for process in self._alive():
            self._reconnect(process)

    def _reconnect(self, process: Process) -> None:
        if process.state != "dead" and not self._nats_away:
            self._broker.reconnect(process.bus)

    async def _pass(self, for_s: float) -> None:
        """So much time, or until the storm is over."""
        try:
            async with asyncio.timeout(for_s):
                await self._quiet.wait()
        except TimeoutError:
            return

    def _calm(self) -> None:
        """Nothing new goes wrong; the faults that last end themselves now."""
        self._tell("quiet")
        self.weather.stormy = False
        self._quiet_s = self._loop.time()
        self._quiet.set()

    # --- requests

    async def _ask_later(self, one: Request) -> None:
        await asyncio.sleep(one.at_s)
        there = [process for process in self._alive("frontend") if process.takes_requests]
        if there:
            self._ask(there[one.frontend % len(there)], one)

    def _ask(self, process: Process, one: Request) -> Answer:
        assert process.frontend is not None
        answer = Answer(one, process.instance, self._loop.time() + one.deadline_s)
        self.answers.append(answer)
        asking = ask(process.frontend, answer, self._tell)
        task = self._loop.create_task(asking, name=one.name, context=process.context.copy())
        task.add_done_callback(lambda _: self._loop.call_later(FREED_S, self._freed, answer))
        self._asking[one.name] = task
        return answer

    def _freed(self, answer: Answer) -> None:
        if self._plan.clear and answer.end == "left":
            self.wrong += [
                f"{process.instance} still computes {answer.request.name}, whose client went {FREED_S} s ago"
                for process in self._alive("worker")
                if process.worker is not None
                and any(
                    request.partition("/")[0] == answer.request.name for request, _ in process.worker._attempts.names
                )
            ]

    async def _ask_again(self) -> None:
        """What is asked now is answered."""
        prefixes = [one.tokens for one in self._plan.requests]
        for process in self._alive("frontend"):
            name = f"again {process.instance}"
            one = request(self._draw, name, self._loop.time(), prefixes)
            one = msgspec.structs.replace(one, deadline_s=20.0, patience_s=30.0)
            answer = self._ask(process, one)
            await asyncio.wait([self._asking[name]], timeout=one.deadline_s + LATE_S)
            if answer.end != "answered":
                self.wrong.append(f"in quiet, {name} ended by {answer.end}: {answer.error!r}")

    # --- quiet

    async def _settle(self, when: str) -> None:
        limit_s = self._loop.time() + QUIET_S
        while next(self._found(), None) is not None:
            if self._loop.time() >= limit_s:
                self.wrong += [f"{when}: {line}" for line in self._found()]
                return
            await asyncio.sleep(LOOK_S)

    def _found(self) -> Iterator[str]:
        yield from (f"{answer.request.name} has no end" for answer in self.answers if answer.end is None)
        yield from (f"{process.instance} crashed" for process in self.processes if _crashed(process))
        try:
            yield from violations(self.processes)
        except AssertionError:
            yield traceback.format_exc(limit=-2)

    def _judge(self, answer: Answer) -> str:
        """What is wrong with an answer and its time. Empty if there is nothing."""
        name, asked = answer.request.name, self._process(answer.frontend)
        if answer.ended_s > answer.deadline_s + LATE_S and not asked.froze:
            return f"{name} ended {answer.ended_s - answer.deadline_s:.3f} s after its deadline"
        stuck_s = answer.deadline_s - max(self._quiet_s, answer.heard_s)
        if isinstance(answer.error, RequestTimeout) and stuck_s > HEALED_S:
            return f"{name} waited for its deadline, though it was quiet for {stuck_s:.3f} s"
        if self._plan.survived and answer.end == "failed" and not isinstance(answer.error, RequestTimeout):
            return f"{name} failed for what should cost a pause: {answer.error!r}"
        return judge(answer)

    def _process(self, instance: str) -> Process:
        return next(process for process in self.processes if process.instance == instance)

    async def _end(self) -> None:
        """Stops everybody, and takes apart what is left."""
        self._quiet.set()
        living = [process for process in self.processes if process.state != "dead"]
        for process in living:
            process.thaw()
            process.stop()
        await asyncio.wait([process.main for process in living], timeout=END_S)
        for process in living:
            if not process.main.done():
                self.wrong.append(f"{process.instance} does not end")
            elif (error := process.main.exception()) is not None:
                self.wrong.append(f"{process.instance} crashed: {error!r}")
        self.wrong += [
            f"a subscription of {subscription.bus.name} failed {statistics.failed} times, "
            f"and could not read {statistics.malformed} messages"
            for subscription in self._broker.all
            if (statistics := subscription.statistics()).failed
            or statistics.malformed > self._broker.torn(subscription)
        ]
        dead = [process for process in self.processes if process.state == "dead"]
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left and not dead:
            self.wrong.append(f"left behind: {sorted(task.get_name() for task in left)}")
        self._loop.set_exception_handler(lambda *_: None)  # what the dead say while they are taken apart
        for process in dead:
            process.bury()
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=END_S)

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        self.wrong.append(f"{told['message']}: {told.get('exception')!r}")


class RememberingBroker(MemoryBroker):
    """Which also knows the subscriptions that have ended, and tears step frames during the storm."""

    def __init__(self, weather: StormyWeather, draw: Random, torn: float, kept_events: KeptEvents) -> None:
        super().__init__(weather)
        self._kept_events = kept_events
        self.all: list[MemorySubscription] = []
        self._stormy = weather
        self._draw = draw
        self._share_torn = torn
        self._torn: Counter[str] = Counter()
        """By subject."""

    def publish(self, message: Message, sender: MemoryBus) -> None:
        frame = self._stormy.stormy and message.subject.endswith(".stream")
        if frame and self._draw.random() < self._share_torn:
            self._torn[message.subject] += 1
            cut = message.payload[: self._draw.randrange(len(message.payload))]
            message = msgspec.structs.replace(message, payload=cut)
        self._kept_events.published(message)
        super().publish(message, sender)

    def torn(self, subscription: MemorySubscription) -> int:
        """How many messages it could not read at most; each may have come twice."""
        return 2 * self._torn[subscription.subject]

    def add(self, subscription: MemorySubscription) -> None:
        super().add(subscription)
        self.all.append(subscription)


def _crashed(process: Process) -> bool:
    return process.main.done() and not process.main.cancelled() and process.main.exception() is not None


@contextmanager
def _eager() -> Iterator[None]:
    """Routers take a pair wherever there is one."""
    pays = WorkerPair.pays
    WorkerPair.pays = property(lambda _: True)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        WorkerPair.pays = pays  # type: ignore[method-assign]


def run(plan: Plan, tell: Callable[[str], None] = lambda _: None) -> list[str]:
    """What went wrong in a plan's world, one line each."""
    wrong: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        world = World(loop, plan, lambda line: tell(f"{loop.time():10.6f} {line}"))
        try:
            await world.run()
        finally:
            wrong.extend(world.wrong)

    with _eager() if plan.sizes.hands_over else nullcontext(), asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        try:
            runner.run(main())
        except (Deadlock, Livelock) as error:
            loop = runner.get_loop()
            assert isinstance(loop, SimulatedLoop)
            loop.thaw_all()
            wrong.append(repr(error))
    return wrong
