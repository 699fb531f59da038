from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest

from services.kvbm.tickets.results import TicketLimits
from services.worker.config import KVConnectorConfig, SimulatedConfig, WorkerConfig
from services.worker.contracts.messages import (
    CancelAttempt,
    Exchanged,
    KvbmAsked,
    KvbmLink,
    Ready,
    Snapshot,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.engine.channel import ChannelClosed
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmNews, KvbmReply, KvbmUp
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.model.facts import facts_of
from shared.errors import ConfigError
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared
from shared.messages.kvbm import StoreLayout
from shared.messages.load import KvState
from tests.simulation.clock import SimulatedLoop
from tests.simulation.simulated_engine import SimulatedEngine
from tests.worker.drawer_socket import answers
from tests.worker.kvbm_drawer import Drawer
from tests.worker.shell import LIMIT_S, endless, request, running_worker, write_model

TIMES = SimulatedConfig(fixed_s=0.0, weights_s=1.0, row_s=0.0, token_s=0.1, pair_s=0.0, kv_token_s=0.0)
"""A step takes a second, or a tenth of one for each of its tokens."""


def config(tmp_path: Path, simulated: SimulatedConfig = TIMES) -> WorkerConfig:
    model = str(write_model(tmp_path / "model"))
    return WorkerConfig(
        model=model, model_name="model", engine="simulated", capacity_blocks=64, stall_s=20.0, simulated=simulated
    )


def simulate(scenario: Coroutine[object, object, None]) -> None:
    """Runs it on a clock of its own."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(scenario)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def submit(name: str, prompt: list[int], max_tokens: int) -> Submit:
    return Submit(
        request=name,
        attempt=1,
        frontend="f",
        tokens=pack_tokens(prompt),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        time_left_s=600.0,
    )


async def opened(tmp_path: Path) -> SimulatedEngine:
    """Ready and its opening heard."""
    engine = await SimulatedEngine.start(config(tmp_path), "model", "w1")
    assert isinstance(await engine.receive(), Ready)
    opening = await engine.receive()
    assert isinstance(opening, Stepped)
    assert opening.events == [AllBlocksCleared()]
    return engine


async def next_step(engine: SimulatedEngine) -> Stepped:
    report = await engine.receive()
    assert isinstance(report, Stepped), report
    return report


async def ended(engine: SimulatedEngine) -> list[Part]:
    parts: list[Part] = []
    while not parts or parts[-1].finish is None:
        parts += (await next_step(engine)).parts.get("f", [])
    return parts


def test_steps_take_the_time_that_the_model_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await opened(tmp_path)
        assert engine.submit(submit("r", list(range(5, 25)), 3))
        ends_s = []
        for _ in range(3):
            step = await next_step(engine)
            ends_s.append((now_s(), step.elapsed_s, step.tokens))
        assert ends_s == [(2.0, 2.0, 20), (3.0, 1.0, 1), (4.0, 1.0, 1)]

    simulate(scenario())


def test_it_says_the_prompt_and_finds_it_in_its_cache_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await opened(tmp_path)
        prompt = list(range(5, 25))
        for name, cached in (("first", 0), ("second", 16)):
            engine.submit(submit(name, prompt, 3))
            parts = await ended(engine)
            assert [token for part in parts for token in unpack_tokens(part.tokens)] == [5, 6, 7]
            assert parts[-1].cached_tokens == cached

    simulate(scenario())


def test_commands_that_come_during_a_step_are_handled_after_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await opened(tmp_path)
        engine.submit(submit("a", [5, 6], 9))
        following = asyncio.ensure_future(next_step(engine))
        await asyncio.sleep(0.5)
        engine.submit(submit("b", [7, 8], 9))
        engine.send(CancelAttempt("a", 1))
        step = await following
        assert now_s() == 1.0
        assert [part.request for part in step.parts["f"]] == ["a"]
        step = await next_step(engine)
        assert [(part.request, part.finish) for part in step.parts["f"]] == [("a", "cancelled"), ("b", None)]

    simulate(scenario())


def test_a_snapshot_is_answered_while_idle(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await opened(tmp_path)
        engine.submit(submit("r", list(range(5, 25)), 1))
        await ended(engine)
        engine.send(TakeEngineSnapshot(3))
        taken = await engine.receive()
        assert isinstance(taken, Snapshot)
        assert (taken.ticket, taken.event_sequence, len(taken.blocks)) == (3, 1, 1)

    simulate(scenario())


def test_a_snapshot_asked_for_while_requests_run_does_not_wait_for_the_next_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await opened(tmp_path)
        engine.submit(submit("r", [5, 6], 9))
        await next_step(engine)
        engine.send(TakeEngineSnapshot(3))
        assert isinstance(await engine.receive(), Snapshot)
        assert now_s() == 1.0
        await next_step(engine)
        assert now_s() == 2.0

    simulate(scenario())


def test_nothing_comes_of_a_frozen_engine_until_it_is_thawed(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await opened(tmp_path)
        engine.submit(submit("r", [5, 6], 2))
        asyncio.get_running_loop().call_later(0.5, engine.freeze)
        asyncio.get_running_loop().call_later(100.0, engine.thaw)
        step = await next_step(engine)
        assert (now_s(), step.elapsed_s) == (100.0, 100.0)
        await next_step(engine)
        assert now_s() == 101.0

    simulate(scenario())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_engine_is_gone_at_once(tmp_path: Path, frozen: bool) -> None:
    async def scenario() -> None:
        engine = await opened(tmp_path)
        engine.submit(submit("r", [5, 6], 2))
        if frozen:
            engine.freeze()
        asyncio.get_running_loop().call_later(0.5, engine.kill)
        with pytest.raises(ChannelClosed):
            await engine.receive()
        assert now_s() == 0.5
        assert await engine.end(LIMIT_S, lambda _report: None) == 0

    simulate(scenario())


def test_a_table_that_is_not_there_is_an_error_of_the_settings(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match=r"none\.toml"):
            await SimulatedEngine.start(
                config(tmp_path, SimulatedConfig(table=str(tmp_path / "none.toml"))), "model", "w1"
            )

    simulate(scenario())


class DrawerConnection:
    """A SocketClient of a kvbm in a drawer, which answers at once."""

    wait_until_s: float | None = None

    def __init__(self, drawer: Drawer, arrived: Callable[[], None]) -> None:
        self._drawer = drawer
        self._arrived = arrived
        self._news: list[KvbmNews] = [KvbmUp(drawer.name)]

    def poll(self, _now_s: float, /) -> list[KvbmNews]:
        news, self._news = self._news, []
        return news

    def send(self, ask: KvbmAsk, now_s: float) -> list[KvbmDown | KvbmReply]:
        self._news += [KvbmReply(ask.number, one.payload, one.last) for one in answers(self._drawer, ask, now_s)]
        self._arrived()
        return []

    def take_asked(self) -> list[KvbmAsked]:
        return []

    def close(self) -> None: ...


def connection(drawer: Drawer, arrived: Callable[[], None]) -> SocketClient:
    return cast(SocketClient, DrawerConnection(drawer, arrived))


def test_engines_exchange_blocks_with_a_kvbm_on_the_same_clock(tmp_path: Path) -> None:
    times = msgspec.structs.replace(TIMES, copy_bytes_per_s=131_072 * 16 * 10.0)  # ten blocks a second
    settings = msgspec.structs.replace(
        config(tmp_path, times), kvbm=KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=60.0), block_size=16
    )

    async def answered(engine: SimulatedEngine, name: str) -> Part:
        """Its last part."""
        engine.submit(submit(name, list(range(5, 70)), 1))
        while True:
            match await engine.receive():
                case Stepped() as step if step.parts:
                    return step.parts["f"][-1]
                case _:
                    pass

    async def linked(engine: SimulatedEngine) -> None:
        while True:
            match await engine.receive():
                case KvbmLink(kvbm):
                    assert kvbm == "k1"
                    return
                case _:
                    pass

    async def scenario() -> None:
        facts = facts_of(Path(settings.model), block_size=16, capacity_blocks=64)
        layout = StoreLayout(model="model", weights=facts.weights, kv=facts.kv_layout)
        drawer = Drawer(tmp_path / "pool", "k1", layout, TicketLimits(), {})
        first = await SimulatedEngine.start(settings, "model", "w1", partial(connection, drawer))
        second = await SimulatedEngine.start(settings, "model", "w2", partial(connection, drawer))
        for engine in (first, second):
            await linked(engine)
        assert (await answered(first, "a")).cached_tokens == 0
        saved = 0
        while saved < 4:
            match await first.receive():
                case Stepped(exchanged=Exchanged(saved_blocks=saved, save_s=took_s)):
                    assert took_s == pytest.approx(0.4)
                case _:
                    pass
        began_s = now_s()
        assert (await answered(second, "b")).cached_host_tokens == 64
        assert now_s() - began_s == pytest.approx(0.4 + 1.0), "four copies, and a step of one token"
        first.kill()
        assert len(drawer.pool.owners.poll()) == 1, "a killed engine's lock is free"
        second.kill()
        drawer.close()

    simulate(scenario())


class Engines:
    """Starts them, and knows the latest."""

    latest: SimulatedEngine

    async def start(self, config: WorkerConfig, model_name: str, instance: str) -> SimulatedEngine:
        self.latest = await SimulatedEngine.start(config, model_name, instance)
        return self.latest


def test_a_worker_serves_with_it_and_starts_another_when_it_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = Engines()
        async with running_worker(config(tmp_path), start_engine=engines.start) as shell:
            await shell.peer.until(lambda: len(shell.directory.cards) == 1)
            await shell.peer.generate(endless("lost"))
            await shell.peer.until(lambda: bool(shell.peer.tokens("lost")))
            engines.latest.kill()
            assert await shell.peer.ended("lost") == "error"
            await shell.peer.until(lambda: shell.worker.engine.facts is not None)
            await shell.peer.generate(request("kept", [5, 6, 7], max_tokens=4))
            assert await shell.peer.ended("kept") == "length"
            assert shell.peer.tokens("kept") == [5, 6, 7, 5]
            await shell.peer.until(lambda: shell.peer.reports[-1].kv == [KvState(0, 2, 0, 0)])

    simulate(scenario())


def test_one_that_stays_frozen_while_requests_wait_is_killed_by_its_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = Engines()
        async with running_worker(config(tmp_path), start_engine=engines.start) as shell:
            await shell.peer.until(lambda: len(shell.directory.cards) == 1)
            await shell.peer.generate(endless("stuck"))
            engines.latest.freeze()
            assert await shell.peer.ended("stuck") == "error"
            assert 10.0 <= now_s() <= 25.0

    simulate(scenario())


def test_a_long_prompt_is_cut_into_steps_that_take_about_as_long_as_the_scheduler_wants(tmp_path: Path) -> None:
    times = SimulatedConfig(context_length=100_000)
    settings = msgspec.structs.replace(config(tmp_path, times), capacity_blocks=8192)

    async def scenario() -> None:
        engine = await SimulatedEngine.start(settings, "model", "w1")
        assert isinstance(await engine.receive(), Ready)
        await engine.receive()
        engine.submit(submit("long", [5, 6, 7] * 30_000, 1))
        steps: list[Stepped] = []
        while not steps or not steps[-1].parts:
            steps.append(await next_step(engine))
        assert sum(step.tokens for step in steps) == 90_000
        assert max(step.elapsed_s for step in steps) < 0.35
        settled = steps[10:-1]
        assert min(step.elapsed_s for step in settled) > 0.2
        assert settled[0].tokens > 1.5 * settled[-1].tokens, "attention makes tokens dearer as the context grows"

    simulate(scenario())
