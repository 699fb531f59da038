"""worker/kv_connector/client.py: finds the kvbm of a pool, carries questions and answers, and never does harm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.worker.contracts.messages import KvbmAsk, KvbmDown, KvbmLink, KvbmReply, KvbmUp
from services.worker.kv_connector.client import ASKS_LIMIT, LINGER_S, LOG_AFTER_S, KvbmClient
from services.worker.kv_connector.metrics import KvbmMetrics
from shared import subjects
from shared.bus.contract import LAST_HEADER, Message, Subscription
from shared.discovery.contract import Registration
from shared.discovery.directory import Directory
from shared.messages.cards import INSTANCE, Instance, ServiceName
from shared.messages.codec import JSON_HEADER
from shared.pool.lock import LOCK, HeldLock
from shared.runtime.runtime import Runtime
from tests.fakes.memory_bus import MemoryBroker, MemoryBus, MemoryEventBus
from tests.fakes.memory_discovery import MemoryDiscovery, MemoryStore
from tests.simulation.clock import SimulatedLoop

NAMESPACE = "test"
LIMIT_S = 180.0
"""Seconds of virtual time."""
LINK = KvbmLink("k1", "5eed", "")


class ScriptedKvbm:
    """Holds the pool's lock, is known to discovery, and answers `echo PAYLOAD`; a fetch in three replies."""

    def __init__(self, world: World, instance: str) -> None:
        self.instance = instance
        self.silent = False
        self.heard: list[Message] = []
        self._bus = MemoryBus(world.broker)
        self._world = world
        self._lock: HeldLock | None = None
        self._registration: Registration | None = None
        self._subscriptions: list[Subscription] = []

    def hold(self) -> None:
        self._lock = HeldLock.acquire(self._world.pool / LOCK, f"1 {self.instance}\n")

    async def announce(self, namespace: str = NAMESPACE, service: ServiceName = "kvbm") -> None:
        entry = Instance(namespace, service, self.instance, 1, "here", 1, 0.0, "0")
        entries = {subjects.instance_key(namespace, service, self.instance): INSTANCE.encode(entry, JSON_HEADER)}
        self._registration = await MemoryDiscovery(self._world.store).register(lambda _epoch: entries)

    async def serve(self) -> None:
        for operation in ("attach", "store", "commit", "abort", "fetch", "release", "discard"):
            subject = subjects.kvbm(NAMESPACE, self.instance, operation)
            self._subscriptions.append(await self._bus.subscribe(subject, self._answer))

    async def start(self) -> None:
        self.hold()
        await self.serve()
        await self.announce()

    async def die(self) -> None:
        """The kernel releases its lock, and no one answers; discovery learns of it later."""
        if self._lock is not None:
            self._lock.close()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def leave(self) -> None:
        assert self._registration is not None
        await self._registration.close()

    async def _answer(self, message: Message) -> None:
        self.heard.append(message)
        if self.silent:
            return
        if not message.subject.endswith(".fetch"):
            await self._bus.publish(message.reply, b"echo " + message.payload)
            return
        for number in (b"1", b"2", b"3"):
            headers = {LAST_HEADER: "true"} if number == b"3" else None
            await self._bus.publish(message.reply, number, headers=headers)


class World:
    """A KvbmClient, and what its engine hears."""

    def __init__(self, pool: Path, tasks: asyncio.TaskGroup) -> None:
        self.pool = pool
        self.broker = MemoryBroker()
        self.store = MemoryStore()
        self.bus = MemoryBus(self.broker)
        self.registry = CollectorRegistry()
        self.heard: list[KvbmUp | KvbmDown | KvbmReply] = []
        self.cards: list[tuple[str, str]] = []
        """(kvbm, layout) at each change of the card."""
        self._more = asyncio.Event()
        discovery = MemoryDiscovery(self.store)
        self.directory = Directory(discovery, self.bus, NAMESPACE)
        runtime = Runtime(
            namespace=NAMESPACE,
            service="worker",
            instance="w1",
            machine="here",
            bus=self.bus,
            events=MemoryEventBus(self.broker),
            discovery=discovery,
            directory=self.directory,
            registry=self.registry,
            tasks=tasks,
            stopping=asyncio.Event(),
        )
        self.client = KvbmClient(
            runtime, str(pool), KvbmMetrics(self.registry), send=self._tell, link_changed=self._link_changed
        )

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not met():
                self._more.clear()
                await self._more.wait()

    async def answers(self, number: int) -> list[KvbmReply]:
        """All to one question, once it has had its last."""

        def of() -> list[KvbmReply]:
            return [one for one in self.heard if isinstance(one, KvbmReply) and one.number == number]

        await self.until(lambda: any(answer.last for answer in of()))
        await asyncio.sleep(LIMIT_S)
        assert [answer.last for answer in of()] == [False] * (len(of()) - 1) + [True], "one last, and it is the last"
        return of()

    def asks(self, operation: str, outcome: str) -> float:
        labels = {"operation": operation, "outcome": outcome}
        return self.registry.get_sample_value("headrace_kvbm_asks_total", labels) or 0.0

    def _tell(self, command: KvbmUp | KvbmDown | KvbmReply) -> None:
        self.heard.append(command)
        self._more.set()

    def _link_changed(self) -> None:
        self.cards.append((self.client.shown_link.kvbm, self.client.shown_link.layout))


@asynccontextmanager
async def world(pool: Path, *, make: bool = True) -> AsyncIterator[World]:
    if make:
        pool.mkdir(mode=0o700)  # noqa: ASYNC240 - nothing else runs yet
    async with asyncio.TaskGroup() as tasks:
        w = World(pool, tasks)
        running = [tasks.create_task(w.directory.run()), tasks.create_task(w.client.run())]
        await w.directory.synced()
        yield w
        for task in running:
            task.cancel()


def simulate(scenario: Coroutine[object, object, None]) -> None:
    """Runs it on a clock of its own."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(scenario)


def ask(number: int, operation: str = "store", timeout_s: float = 2.0) -> KvbmAsk:
    assert operation in ("store", "fetch", "attach")
    return KvbmAsk(number, operation, b"%d" % number, timeout_s)  # type: ignore[arg-type]  # asserted


# --- which kvbm


def test_a_kvbm_is_named_to_the_engine_once_it_holds_the_lock_and_discovery_knows_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            kvbm.hold()
            await asyncio.sleep(3)
            assert w.heard == []
            await kvbm.announce()
            await w.until(lambda: w.heard == [KvbmUp("k1")])
            await asyncio.sleep(10)
            assert w.heard == [KvbmUp("k1")], "once"

    simulate(scenario())


def test_a_kvbm_that_starts_again_is_another_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            first, second = ScriptedKvbm(w, "k1"), ScriptedKvbm(w, "k2")
            await first.start()
            await w.until(lambda: w.heard == [KvbmUp("k1")])
            await first.die()
            second.hold()
            await w.until(lambda: len(w.heard) == 2)
            assert isinstance(w.heard[1], KvbmDown)
            await second.announce()
            await w.until(lambda: w.heard[2:] == [KvbmUp("k2")])
            await first.leave()
            await asyncio.sleep(10)
            assert len(w.heard) == 3, "that the one before leaves discovery is no news"

    simulate(scenario())


def test_a_kvbm_that_leaves_discovery_is_down_and_is_up_when_it_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            await kvbm.start()
            await w.until(lambda: len(w.heard) == 1)
            await kvbm.leave()
            await w.until(lambda: len(w.heard) == 2)
            await kvbm.announce()
            await w.until(lambda: len(w.heard) == 3)
            up, down, again = w.heard
            assert up == again == KvbmUp("k1")
            assert isinstance(down, KvbmDown)
            assert "k1" in down.reason

    simulate(scenario())


def test_a_lock_that_cannot_be_read_for_once_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            await ScriptedKvbm(w, "k1").start()
            await w.until(lambda: len(w.heard) == 1)
            (w.pool / LOCK).write_bytes(b"")
            await asyncio.sleep(10)
            assert w.heard == [KvbmUp("k1")]

    simulate(scenario())


def test_the_kvbm_is_named_to_every_engine_that_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            w.client.engine_ready()
            assert w.heard == [], "there is none yet"
            await ScriptedKvbm(w, "k1").start()
            await w.until(lambda: len(w.heard) == 1)
            w.client.engine_lost()
            w.client.engine_ready()
            assert w.heard == [KvbmUp("k1"), KvbmUp("k1")]

    simulate(scenario())


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("missing", "start a kvbm with that pool.directory, or correct kvbm.pool"),
        ("empty", "no kvbm has run"),
        ("open to others", "no other user may write to it"),
        ("a file", "is not a directory"),
        ("another namespace", "serves another namespace"),
        ("another service", "serves another namespace"),
    ],
)
def test_why_no_kvbm_is_found_is_logged_once_when_it_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: str, told: str
) -> None:
    pool = tmp_path / "pool"

    async def scenario() -> None:
        async with world(pool, make=trouble not in ("missing", "a file")) as w:
            match trouble:
                case "open to others":
                    pool.chmod(0o777)
                case "a file":
                    pool.write_bytes(b"")
                case "another namespace":
                    kvbm = ScriptedKvbm(w, "k1")
                    kvbm.hold()
                    await kvbm.announce(namespace="elsewhere")
                case "another service":
                    kvbm = ScriptedKvbm(w, "k1")
                    kvbm.hold()
                    await kvbm.announce(service="worker")
            await asyncio.sleep(LOG_AFTER_S - 2)
            assert told not in caplog.text
            await asyncio.sleep(120)
            assert caplog.text.count(told) == 1
            assert w.heard == []
            w.client.handle_engine_message(ask(1))
            assert w.heard == [KvbmReply(1, b"", failed="there is no kvbm")]

    with caplog.at_level(logging.WARNING):
        simulate(scenario())


def test_without_a_pool_nothing_is_looked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            w = World(tmp_path, tasks)
            client = KvbmClient(
                w.client._runtime, "", KvbmMetrics(CollectorRegistry()), send=w.heard.append, link_changed=lambda: None
            )
            await client.run()
            client.engine_ready()
            client.engine_lost()
            assert w.heard == []
            assert client.missing == ""

    simulate(scenario())


# --- questions


def test_questions_and_answers_pass_as_they_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            await kvbm.start()
            await w.until(lambda: len(w.heard) == 1)
            w.client.handle_engine_message(ask(7))
            assert await w.answers(7) == [KvbmReply(7, b"echo 7")]
            w.client.handle_engine_message(ask(8, "fetch"))
            replies = [KvbmReply(8, b"1", last=False), KvbmReply(8, b"2", last=False), KvbmReply(8, b"3")]
            assert await w.answers(8) == replies
            assert w.asks("store", "answered") == w.asks("fetch", "answered") == 1

    simulate(scenario())


@pytest.mark.parametrize("operation", ["store", "fetch"])
def test_a_kvbm_that_does_not_answer_costs_its_time_out(tmp_path: Path, operation: str) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            await kvbm.start()
            kvbm.silent = True
            await w.until(lambda: len(w.heard) == 1)
            began_s = asyncio.get_running_loop().time()
            w.client.handle_engine_message(ask(1, operation, 3.0))
            await w.until(lambda: len(w.heard) == 2)
            assert asyncio.get_running_loop().time() - began_s == pytest.approx(3.0)
            [failed] = await w.answers(1)
            assert "no answer" in failed.failed
            assert w.asks(operation, "late") == 1

    simulate(scenario())


def test_a_fetch_that_breaks_off_fails_after_the_answers_that_came(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            kvbm.hold()
            await kvbm.announce()
            bus = MemoryBus(w.broker)

            async def begin(message: Message) -> None:
                await bus.publish(message.reply, b"some")

            await bus.subscribe(subjects.kvbm(NAMESPACE, "k1", "fetch"), begin)
            await w.until(lambda: len(w.heard) == 1)
            w.client.handle_engine_message(ask(1, "fetch"))
            first, failed = await w.answers(1)
            assert first == KvbmReply(1, b"some", last=False)
            assert failed.failed
            assert failed.last

    simulate(scenario())


@pytest.mark.parametrize("away", ["died", "NATS"])
def test_what_cannot_be_asked_fails_at_once(tmp_path: Path, away: str) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            await kvbm.start()
            await w.until(lambda: len(w.heard) == 1)
            if away == "died":
                await kvbm.die()
            else:
                w.broker.disconnect(w.bus)
            began_s = asyncio.get_running_loop().time()
            w.client.handle_engine_message(ask(1))
            w.client.handle_engine_message(ask(2, "fetch"))
            await w.until(lambda: len(w.heard) == 3)
            assert asyncio.get_running_loop().time() - began_s < 0.5
            assert all(isinstance(failed, KvbmReply) and failed.failed for failed in w.heard[1:])
            assert w.asks("store", "away") == w.asks("fetch", "away") == 1

    simulate(scenario())


def test_beyond_the_limit_questions_fail_at_once_and_room_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            await kvbm.start()
            kvbm.silent = True
            await w.until(lambda: len(w.heard) == 1)
            for number in range(ASKS_LIMIT):
                w.client.handle_engine_message(ask(number))
            assert len(w.heard) == 1
            w.client.handle_engine_message(ask(ASKS_LIMIT))
            assert isinstance(w.heard[-1], KvbmReply)
            assert w.heard[-1].number == ASKS_LIMIT
            assert w.asks("store", "too_many") == 1
            await w.until(lambda: len(w.heard) == 2 + ASKS_LIMIT)
            kvbm.silent = False
            await asyncio.sleep(1)
            w.client.handle_engine_message(ask(1000))
            assert await w.answers(1000) == [KvbmReply(1000, b"echo 1000")]

    simulate(scenario())


def test_answers_to_an_engine_that_is_lost_do_not_reach_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            await ScriptedKvbm(w, "k1").start()
            await w.until(lambda: len(w.heard) == 1)
            w.client.handle_engine_message(ask(1))
            w.client.handle_engine_message(ask(2, "fetch"))
            w.client.engine_lost()
            w.client.engine_ready()
            w.client.handle_engine_message(ask(1, "attach"))
            await asyncio.sleep(LIMIT_S)
            assert w.heard[1:] == [KvbmUp("k1"), KvbmReply(1, b"echo 1")]
            assert w.asks("attach", "answered") == 1
            assert w.asks("store", "answered") == 0

    simulate(scenario())


# --- the link


def test_the_card_tells_of_a_link_at_once_and_of_its_end_when_that_lasts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            w.client.handle_engine_message(LINK)
            assert w.cards == [("k1", "5eed")]
            w.client.handle_engine_message(KvbmLink("", "", "not answered"))
            await asyncio.sleep(LINGER_S / 2)
            w.client.handle_engine_message(LINK)
            await asyncio.sleep(10)
            assert len(w.cards) == 1, "it attached anew, soon"
            w.client.handle_engine_message(KvbmLink("", "", "not answered"))
            w.client.handle_engine_message(KvbmLink("", "", "refused"))
            await asyncio.sleep(LINGER_S + 1)
            assert w.cards == [("k1", "5eed"), ("", "")]
            w.client.handle_engine_message(KvbmLink("k2", "5eed", ""))
            w.client.handle_engine_message(KvbmLink("k2", "f00d", ""))
            assert w.cards[2:] == [("k2", "5eed"), ("k2", "f00d")]
            assert w.registry.get_sample_value("headrace_kvbm_attached") == 1

    simulate(scenario())


def test_each_kind_of_reason_why_an_up_kvbm_is_not_used_is_logged_once_a_minute_and_that_none_is_up_not_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            kvbm = ScriptedKvbm(w, "k1")
            await kvbm.start()
            await w.until(lambda: len(w.heard) == 1)
            for reason in ("not_ready: 3 % are made", "not_ready: 9 % are made", "no_arena: all 1 are in use"):
                w.client.handle_engine_message(KvbmLink("", "", f"attach: {reason}"))
                await asyncio.sleep(10)
            assert "no blocks are exchanged: attach: not_ready: 3 %" in caplog.text
            assert "9 %" not in caplog.text
            assert "no blocks are exchanged: attach: no_arena: all 1 are in use" in caplog.text
            await kvbm.leave()
            await w.until(lambda: len(w.heard) == 2)
            down = w.heard[1]
            assert isinstance(down, KvbmDown)
            await asyncio.sleep(60)
            w.client.handle_engine_message(KvbmLink("", "", down.reason))
            assert caplog.text.count(down.reason) == 1

    with caplog.at_level(logging.WARNING):
        simulate(scenario())


def test_it_says_why_no_blocks_are_exchanged_as_long_as_that_is_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            await asyncio.sleep(1)
            assert "no kvbm has run in" in w.client.missing
            kvbm = ScriptedKvbm(w, "k1")
            await kvbm.start()
            await w.until(lambda: len(w.heard) == 1)
            assert w.client.missing == "the engine has not attached yet"
            w.client.handle_engine_message(KvbmLink("", "", "attach: not_ready: 3 % are made"))
            assert w.client.missing == "attach: not_ready: 3 % are made"
            w.client.handle_engine_message(LINK)
            assert w.client.missing == ""

    simulate(scenario())


def test_the_link_ends_with_its_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "pool") as w:
            w.client.handle_engine_message(LINK)
            w.client.engine_lost()
            assert w.cards == [("k1", "5eed"), ("", "")]
            assert w.registry.get_sample_value("headrace_kvbm_attached") == 0

    simulate(scenario())
