"""services/worker/operations/operator.py: operations over the bus, with an engine that answers what a test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import (
    PARTS,
    CancelAttempt,
    EngineLoad,
    EngineReport,
    Loading,
    Operate,
    Operated,
    Ready,
    Stepped,
    Submit,
)
from services.worker.engine import supervisor
from services.worker.model.lora_files import digest_lora
from services.worker.operations import operator
from services.worker.operations.operations import MOST_STARTS
from shared import subjects
from shared.errors import ModelError
from shared.lora import make_lora_id
from shared.messages.frames import SHUTTING_DOWN, Part
from shared.messages.generate import Accepted, Refused
from shared.messages.people import OPERATE_WORKER, WORKER_OPERATED, OperateWorker, WorkerOperated, WorkerOperation
from tests.worker.scripted_engine import FACTS, ScriptedEngine
from tests.worker.shell import FRONTEND, NAMESPACE, WORKER, Shell, request, running_worker, write_model

PROMPT = [5, 6, 7]


ABLE = msgspec.structs.replace(FACTS, operations=("sleep", "wake", "load_lora", "unload_lora", "clear"))


class OperableEngines:
    """Engines that can do every operation. They are loaded at once; the rest they report when a test says so."""

    def __init__(self) -> None:
        self.facts: Ready | None = ABLE
        """What an engine that starts is. None if it does not become ready."""
        self.kind: type[ScriptedEngine] = ScriptedEngine
        """What is started."""
        self.all: list[ScriptedEngine] = []

    async def start(self, _config: WorkerConfig, _model_name: str, instance: str) -> ScriptedEngine:
        self.all.append(self.kind(instance, self.facts or Loading("reading", 0.5)))
        return self.all[-1]

    @property
    def last(self) -> ScriptedEngine:
        return self.all[-1]

    def have_started(self, count: int) -> bool:
        return len(self.all) == count

    async def asked(self, operation: str) -> Operate:
        """Wait until the last engine's last order is this operation, and return it."""
        async with asyncio.timeout(60.0):
            while True:
                orders = [each for each in self.last.told if isinstance(each, Operate)] if self.all else []
                if orders and orders[-1].operation == operation:
                    return orders[-1]
                await asyncio.sleep(0.005)

    async def do(self, operation: str, failed: str = "") -> Operate:
        """Wait for an operation, answer it, and return it."""
        order = await self.asked(operation)
        self.last.told.remove(order)
        self.last.report(Operated(order.ticket, failed))
        return order

    def end(self, name: str) -> None:
        """The engine reports the end of an attempt."""
        part = Part(name, 1, first=0, tokens=b"", finish="stop")
        step: dict[str, Any] = {"event_batch": b"", "event_sequence": -1, "digest": 0, "load": EngineLoad()}
        self.last.report(
            Stepped(
                progress=1,
                encoded_parts={FRONTEND: PARTS.encode([part])},
                boundary_parts=[part],
                one_token_attempts=[],
                **step,
            )
        )


@pytest.fixture
def engines() -> OperableEngines:
    return OperableEngines()


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(namespace=NAMESPACE, model=str(write_model(tmp_path / "model")), engine="echo", drain_s=30.0)


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_files(tmp_path / "lora")


def write_files(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}", encoding="utf-8")
    header = json.dumps({"t": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return directory


async def serving(shell: Shell, shown: bool = True) -> None:
    await shell.peer.until(lambda: (("model", WORKER) in shell.directory.cards) == shown)


def asking(shell: Shell, operation: WorkerOperation, **fields: Any) -> asyncio.Task[WorkerOperated]:
    async def ask() -> WorkerOperated:
        answer = await shell.peer.ask("operate", OPERATE_WORKER.encode(OperateWorker(operation, **fields)))
        return WORKER_OPERATED.decode(answer.payload, answer.headers)

    return asyncio.ensure_future(ask())


async def test_a_worker_whose_model_takes_turns_is_known_asleep_and_ready_for_its_turn(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(msgspec.structs.replace(config, turns="cpu"), start_engine=engines.start) as shell:
        await shell.peer.until(lambda: bool(engines.all))
        early = await asking(shell, "wake")
        assert (early.busy, early.failed[:6]) == (True, "wake: ")
        assert (await engines.do("sleep")).level == 2
        await shell.peer.until(lambda: WORKER in shell.directory.instances)
        known = shell.directory.instances[WORKER]
        assert (known.state, shell.directory.cards) == ("asleep", {})
        assert known.turns is not None
        assert (known.turns.device, known.turns.card.model) == ("cpu", "model")
        await shell.peer.until(lambda: not shell.runtime.health.reasons)
        waking = asking(shell, "wake")
        await engines.do("wake")
        assert await waking == WorkerOperated(WORKER)
        await serving(shell)
        card = shell.directory.cards["model", WORKER]
        known = shell.directory.instances[WORKER]
        assert known.turns is not None
        assert known.turns.card == card
        assert await shell.peer.generate(request("r", PROMPT)) == Accepted("r", 1)
        sleeping = asking(shell, "sleep", drain_s=0.0)
        await shell.peer.until(lambda: shell.peer.finish("r") is not None)  # it is handed back
        engines.end("r")
        await engines.do("sleep")
        assert await sleeping == WorkerOperated(WORKER, state="asleep")


async def test_an_engine_that_is_frozen_as_it_wakes_is_killed_when_the_order_says(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(msgspec.structs.replace(config, turns="cpu"), start_engine=engines.start) as shell:
        await engines.do("sleep")
        await shell.peer.until(lambda: not shell.runtime.health.reasons)
        woken = await asking(shell, "wake", engine_s=0.2)
        assert (woken.failed, woken.state) == ("wake: the engine did not answer in 0.2 s", "asleep")
        await shell.peer.until(lambda: len(engines.all) == 2)
        await engines.do("sleep")
        waking = asking(shell, "wake")
        await engines.do("wake")
        assert await waking == WorkerOperated(WORKER)


async def test_a_model_by_turns_whose_engines_are_lost_in_a_row_sleeps_without_one_until_it_is_woken(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(msgspec.structs.replace(config, turns="cpu"), start_engine=engines.start) as shell:
        await engines.do("sleep")
        await shell.peer.until(lambda: not shell.runtime.health.reasons)
        waking = asking(shell, "wake")
        await engines.do("wake")
        assert await waking == WorkerOperated(WORKER)
        for lost in range(1, MOST_STARTS + 1):
            await shell.peer.until(lambda: shell.runtime.health.reasons == [])
            engines.last.kill()
            if lost < MOST_STARTS:
                await shell.peer.until(partial(engines.have_started, lost + 1))
                await serving(shell)
        await shell.peer.until(lambda: shell.directory.instances[WORKER].state == "asleep")
        await shell.peer.until(lambda: not shell.runtime.health.reasons)
        [note] = shell.runtime.health.also()["notes"][-1:]
        assert note.startswith("its engine is stopped, and starts when a request wakes the model: 3 engines in a row")
        assert len(engines.all) == MOST_STARTS
        engines.facts = None
        hanging = await asking(shell, "wake", engine_s=0.1)
        assert hanging.failed.startswith("the engine did not start in ")
        assert (hanging.state, hanging.busy) == ("asleep", False)
        engines.facts = ABLE
        assert await asking(shell, "wake") == WorkerOperated(WORKER)
        await serving(shell)
        assert len(engines.all) == MOST_STARTS + 2


async def test_a_model_by_turns_gives_way_while_its_engine_starts(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(msgspec.structs.replace(config, turns="cpu"), start_engine=engines.start) as shell:
        await engines.do("sleep")
        await shell.peer.until(lambda: not shell.runtime.health.reasons)
        waking = asking(shell, "wake")
        await engines.do("wake")
        assert await waking == WorkerOperated(WORKER)
        engines.facts = None
        engines.last.kill()
        await shell.peer.until(lambda: len(engines.all) == 2)
        assert await asking(shell, "sleep") == WorkerOperated(WORKER, state="asleep")
        engines.facts = ABLE
        assert await asking(shell, "wake") == WorkerOperated(WORKER)
        await serving(shell)
        assert len(engines.all) == 3
        lost = shell.runtime.registry.get_sample_value("headrace_engine_restarts_total")
        assert lost == 1, "the one that was stopped is not lost"


class SlowlyEnding(ScriptedEngine):
    """Its memory takes long to be freed: it has ended when the test says so."""

    def __init__(self, instance: str, first: EngineReport) -> None:
        super().__init__(instance, first)
        self.freed = asyncio.Event()

    async def end(self, limit_s: float, last: Callable[[EngineReport], None], /) -> int:
        await self.freed.wait()
        return await super().end(limit_s, last)


async def test_an_engine_that_hangs_as_it_starts_is_ended_also_if_the_one_before_it_ended_slowly(
    config: WorkerConfig, engines: OperableEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_LIMIT_S", 0.05)
    async with running_worker(msgspec.structs.replace(config, turns="cpu"), start_engine=engines.start) as shell:
        await engines.do("sleep")
        await shell.peer.until(lambda: not shell.runtime.health.reasons)
        waking = asking(shell, "wake")
        await engines.do("wake")
        assert await waking == WorkerOperated(WORKER)
        engines.facts, engines.kind = None, SlowlyEnding
        engines.last.kill()
        await shell.peer.until(lambda: len(engines.all) == 2)
        slow = engines.last
        assert isinstance(slow, SlowlyEnding)
        assert await asking(shell, "sleep") == WorkerOperated(WORKER, state="asleep")
        engines.kind = ScriptedEngine
        waking = asking(shell, "wake", engine_s=0.1)
        await shell.peer.until(shell.worker.engine._gate.wanted.is_set)
        slow.freed.set()
        async with asyncio.timeout(60.0):
            woken = await waking
        assert woken.failed.startswith("the engine did not start in ")
        assert (woken.state, woken.busy) == ("asleep", False)
        assert len(engines.all) == 3


async def test_the_loras_of_a_model_that_takes_turns_stay_known_while_it_sleeps(
    config: WorkerConfig, engines: OperableEngines, lora: Path
) -> None:
    lora_id = make_lora_id("sql", digest_lora(lora))
    async with running_worker(msgspec.structs.replace(config, turns="cpu"), start_engine=engines.start) as shell:

        def known() -> tuple[str, ...]:
            turns = shell.directory.instances[WORKER].turns
            return () if turns is None else turns.card.lora

        await engines.do("sleep")
        await shell.peer.until(lambda: WORKER in shell.directory.instances)
        waking = asking(shell, "wake")
        await engines.do("wake")
        await waking
        loading = asking(shell, "load_lora", name="sql", path=str(lora))
        await engines.do("load_lora")
        await loading
        sleeping = asking(shell, "sleep", level=2)
        assert (await engines.do("unload_lora")).name == lora_id
        await engines.do("sleep")
        assert await sleeping == WorkerOperated(WORKER, state="asleep")
        await shell.peer.until(lambda: shell.directory.instances[WORKER].state == "asleep")
        assert known() == (lora_id,)
        waking = asking(shell, "wake")
        await engines.do("wake")
        await engines.do("load_lora")
        await waking
        unloading = asking(shell, "unload_lora", name="sql")
        await engines.do("unload_lora")
        await unloading
        await shell.peer.until(lambda: known() == ())


async def test_sleep_waits_for_what_runs_and_wake_shows_the_card_again(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        assert await shell.peer.generate(request("r", PROMPT)) == Accepted("r", 1)
        sleeping = asking(shell, "sleep", level=2)
        await serving(shell, shown=False)
        await shell.peer.until(lambda: shell.directory.instances[WORKER].state == "draining")
        late = await shell.peer.generate(request("late", PROMPT))
        assert isinstance(late, Refused)
        assert (late.code, late.reason) == ("draining", "this worker is draining")
        assert shell.runtime.health.reasons == ["this worker is draining"]
        assert not [order for order in engines.last.told if isinstance(order, Operate)]
        engines.end("r")
        assert (await engines.do("sleep")).level == 2
        assert await sleeping == WorkerOperated(WORKER, state="asleep")
        await shell.peer.until(lambda: shell.directory.instances[WORKER].state == "asleep")
        assert shell.runtime.health.reasons == ["this worker is asleep"]
        waking = asking(shell, "wake")
        await engines.asked("wake")
        assert ("model", WORKER) not in shell.directory.cards
        await engines.do("wake")
        assert await waking == WorkerOperated(WORKER)
        await serving(shell)
        await shell.peer.until(lambda: shell.directory.instances[WORKER].state == "")
        assert await shell.peer.generate(request("again", PROMPT)) == Accepted("again", 1)
        engines.end("again")


async def test_what_takes_longer_than_drain_s_is_handed_back(config: WorkerConfig, engines: OperableEngines) -> None:
    short = msgspec.structs.replace(config, drain_s=0.1)
    async with running_worker(short, start_engine=engines.start) as shell:
        await serving(shell)
        await shell.peer.generate(request("r", PROMPT))
        draining = asking(shell, "drain")
        await shell.peer.until(lambda: bool(shell.peer.parts("r")))
        [part] = shell.peer.parts("r")
        assert (part.finish, part.error) == ("error", SHUTTING_DOWN)
        assert CancelAttempt("r", 1) in engines.last.told
        assert not draining.done(), "the engine has not ended it"
        engines.end("r")
        assert await draining == WorkerOperated(WORKER, state="drained")
        assert await asking(shell, "resume") == WorkerOperated(WORKER)
        await serving(shell)


async def test_an_engine_that_does_not_end_what_was_handed_back_fails_the_operation(
    config: WorkerConfig, engines: OperableEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "HAND_BACK_LIMIT_S", 0.2)
    short = msgspec.structs.replace(config, drain_s=0.1)
    async with running_worker(short, start_engine=engines.start) as shell:
        await serving(shell)
        await shell.peer.generate(request("r", PROMPT))
        drained = await asking(shell, "drain")
        assert drained == WorkerOperated(WORKER, failed="the engine did not end 1 attempts in 0.2 s")
        await serving(shell)
        engines.end("r")


async def test_a_lora_is_in_the_card_under_its_id_while_it_is_loaded(
    config: WorkerConfig, engines: OperableEngines, lora: Path
) -> None:
    lora_id = make_lora_id("sql", digest_lora(lora))
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        loading = asking(shell, "load_lora", name="sql", path=str(lora))
        order = await engines.do("load_lora")
        assert (order.name, order.path) == (lora_id, str(lora))
        assert await loading == WorkerOperated(WORKER, lora=(lora_id,))
        await shell.peer.until(lambda: shell.directory.cards["model", WORKER].lora == (lora_id,))
        assert await shell.peer.generate(request("r", PROMPT, lora=lora_id)) == Accepted("r", 1)
        refused = await shell.peer.generate(request("x", PROMPT, lora="other"))
        assert isinstance(refused, Refused)
        assert refused.code == "wrong_model"
        [submit] = [order for order in engines.last.told if isinstance(order, Submit)]
        assert submit.lora == lora_id
        unloading = asking(shell, "unload_lora", name="sql")
        await shell.peer.until(lambda: shell.directory.cards["model", WORKER].lora == ())
        assert isinstance(await shell.peer.generate(request("y", PROMPT, lora=lora_id)), Refused)
        assert await shell.peer.generate(request("base", PROMPT)) == Accepted("base", 1)
        assert not [order for order in engines.last.told if isinstance(order, Operate)], "r is running"
        engines.end("r")
        assert (await engines.do("unload_lora")).name == lora_id
        assert await unloading == WorkerOperated(WORKER)
        engines.end("base")


async def test_loras_are_loaded_again_before_the_card_is_shown_unless_their_files_have_changed(
    config: WorkerConfig, engines: OperableEngines, tmp_path: Path
) -> None:
    same, changed = write_files(tmp_path / "same"), write_files(tmp_path / "changed")
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        for name, path in (("same", same), ("changed", changed)):
            loading = asking(shell, "load_lora", name=name, path=str(path))
            await engines.do("load_lora")
            assert not (await loading).failed
        write_files(changed, b"other weights")
        engines.last.kill()
        await serving(shell, shown=False)
        await shell.peer.until(lambda: len(engines.all) == 2)
        await engines.asked("load_lora")
        assert ("model", WORKER) not in shell.directory.cards
        assert (await engines.do("load_lora")).name.startswith("same@")
        await serving(shell)
        assert [each.partition("@")[0] for each in shell.directory.cards["model", WORKER].lora] == ["same"]


async def test_a_file_of_8_gib_without_a_header_is_refused_before_it_is_read(
    config: WorkerConfig, engines: OperableEngines, lora: Path
) -> None:
    with (lora / "adapter_model.safetensors").open("wb") as file:
        file.truncate(8 << 30)
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        refused = await asking(shell, "load_lora", name="sql", path=str(lora))
        assert refused.failed.endswith("adapter_model.safetensors: torn or not a safetensors file (8589934592 bytes)")
        assert (await asking(shell, "drain")).state == "drained"


async def test_the_end_of_a_worker_does_not_wait_for_the_files_of_a_lora(
    config: WorkerConfig, engines: OperableEngines, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, ended = threading.Event(), threading.Event()

    def read(_path: Path, given_up: threading.Event) -> str:
        reading.set()
        if given_up.wait(60.0):
            ended.set()
        raise ModelError("it was given up")

    monkeypatch.setattr(operator, "digest_lora", read)
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        loading = asking(shell, "load_lora", name="sql", path=str(lora))
        await asyncio.to_thread(reading.wait, 60.0)
    assert (await loading).failed == SHUTTING_DOWN
    assert await asyncio.to_thread(ended.wait, 60.0)


async def test_files_that_change_while_the_engine_reads_them_are_not_kept(
    config: WorkerConfig, engines: OperableEngines, lora: Path
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        loading = asking(shell, "load_lora", name="sql", path=str(lora))
        loaded = await engines.asked("load_lora")
        write_files(lora, b"other weights")
        await engines.do("load_lora")
        assert (await engines.do("unload_lora")).name == loaded.name
        assert await loading == WorkerOperated(WORKER, failed=f"path: the files of {lora} have changed")
        loading = asking(shell, "load_lora", name="sql", path=str(lora))
        await engines.asked("load_lora")
        write_files(lora, b"weights")
        await engines.do("load_lora")
        await engines.do("unload_lora", failed="the engine keeps it")
        assert await loading == WorkerOperated(WORKER, failed="the engine keeps it")
        await shell.peer.until(lambda: len(engines.all) == 2)
        await serving(shell)
        assert shell.directory.cards["model", WORKER].lora == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is not a directory that this worker sees"),
        ({}, "adapter_config.json is not there"),
        ({"adapter_config.json": b"{}"}, "adapter_model.safetensors is not there"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b""}, "adapter_model.bin is a pickle"),
    ],
)
async def test_a_lora_without_its_files_is_refused_and_the_worker_serves_on(
    config: WorkerConfig, engines: OperableEngines, tmp_path: Path, content: dict[str, bytes] | None, words: str
) -> None:
    directory = tmp_path / "lora"
    if content is not None:
        directory.mkdir()
        for name, held in content.items():
            (directory / name).write_bytes(held)
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        operated = await asking(shell, "load_lora", name="sql", path=str(directory))
        assert operated.failed.startswith("load_lora: path: ")
        assert words in operated.failed
        assert ("model", WORKER) in shell.directory.cards


@pytest.mark.parametrize("path", ["/" + "a" * 300, "/" + "a/" * 1500, "/" + "a/" * 3000])
async def test_a_path_that_the_operating_system_refuses_does_not_end_the_worker(
    config: WorkerConfig, engines: OperableEngines, path: str
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        operated = await asking(shell, "load_lora", name="poet", path=path)
        assert operated.failed.startswith("load_lora: path: ")
        assert await asking(shell, "drain") == WorkerOperated(WORKER, state="drained")


async def test_resume_is_answered_once_discovery_has_the_card_so_that_routers_can_know(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        assert (await asking(shell, "drain")).state == "drained"
        await serving(shell, shown=False)
        shell.store.outage()
        resuming = asking(shell, "resume")
        await shell.peer.until(lambda: shell.runtime.health.reasons == ["registering"])
        for _ in range(100):  # an answer that did not wait would be here
            await asyncio.sleep(0)
        assert not resuming.done()
        shell.store.recover()
        assert await resuming == WorkerOperated(WORKER)
        await serving(shell)


async def test_a_second_operation_is_refused_while_the_first_waits_until_discovery_has_the_card(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        assert (await asking(shell, "drain")).state == "drained"
        await serving(shell, shown=False)
        shell.store.outage()
        resuming = asking(shell, "resume")
        await shell.peer.until(lambda: shell.runtime.health.reasons == ["registering"])
        assert (await asking(shell, "drain")).failed == "drain: resume is running; try again when it has ended"
        shell.store.recover()
        assert await resuming == WorkerOperated(WORKER)
        assert await asking(shell, "drain") == WorkerOperated(WORKER, state="drained")


async def test_clear_does_not_wait_for_discovery(config: WorkerConfig, engines: OperableEngines) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        shell.store.outage()
        clearing = asking(shell, "clear")
        await engines.do("clear")
        assert await clearing == WorkerOperated(WORKER)
        shell.store.recover()


async def test_resume_says_so_when_discovery_does_not_take_the_card_in_time(
    config: WorkerConfig, engines: OperableEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "PUBLISH_LIMIT_S", 0.01)
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        assert (await asking(shell, "drain")).state == "drained"
        await serving(shell, shown=False)
        shell.store.outage()
        assert (await asking(shell, "resume")) == WorkerOperated(WORKER, failed=operator.NOT_PUBLISHED)
        shell.store.recover()
        await serving(shell)


async def test_a_drained_worker_keeps_its_role_in_the_address_book(
    config: WorkerConfig, engines: OperableEngines, tmp_path: Path
) -> None:
    kvbm = msgspec.structs.replace(config.kvbm, pool=str(tmp_path / "pool"))
    decodes = msgspec.structs.replace(config, engine="simulated", role="decode", kvbm=kvbm)
    async with running_worker(decodes, start_engine=engines.start) as shell:
        await serving(shell)
        assert (await asking(shell, "drain")).state == "drained"
        await shell.peer.until(lambda: shell.directory.instances[WORKER].state == "drained")
        assert shell.directory.instances[WORKER].role == "decode"


async def test_a_second_operation_is_refused_while_one_runs(config: WorkerConfig, engines: OperableEngines) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        clearing = asking(shell, "clear")
        await engines.asked("clear")
        assert (await asking(shell, "drain")).failed == "drain: clear is running; try again when it has ended"
        await engines.do("clear", failed="clear: blocks are in use")
        assert (await clearing).failed == "clear: blocks are in use"


async def test_an_engine_that_dies_fails_the_operation_and_a_worker_that_sleeps_sleeps_on(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        clearing = asking(shell, "clear")
        await engines.asked("clear")
        engines.last.kill()
        assert (await clearing).failed == "the engine is lost"
        await serving(shell, shown=False)
        await serving(shell)
        sleeping = asking(shell, "sleep")
        await engines.do("sleep")
        assert (await sleeping).state == "asleep"
        engines.last.kill()
        await shell.peer.until(lambda: len(engines.all) == 3)
        await engines.do("sleep")
        assert ("model", WORKER) not in shell.directory.cards
        assert (await asking(shell, "sleep")).failed == "sleep: the worker is asleep already"


async def test_an_engine_that_does_not_answer_is_killed(
    config: WorkerConfig, engines: OperableEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "ENGINE_LIMIT_S", 0.2)
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        assert (await asking(shell, "clear")).failed == "clear: the engine did not answer in 0.2 s"
        await shell.peer.until(lambda: len(engines.all) == 2)
        await serving(shell)


async def test_a_worker_that_shuts_down_answers_the_operation_that_runs(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        clearing = asking(shell, "clear")
        await engines.asked("clear")
        shell.runtime.stopping.set()
        assert (await clearing).failed in (SHUTTING_DOWN, "the engine is lost")


async def test_a_message_that_cannot_be_read_is_answered_with_what_is_wrong(
    config: WorkerConfig, engines: OperableEngines
) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        answer = await shell.peer.ask("operate", b"\xc1")
        assert "operation" in WORKER_OPERATED.decode(answer.payload, answer.headers).failed


async def test_people_ask_in_json(config: WorkerConfig, engines: OperableEngines) -> None:
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        answer = await shell.peer.bus.request(
            subjects.worker(NAMESPACE, WORKER, "operate"),
            json.dumps({"type": "operate", "operation": "wake"}).encode(),
            timeout_s=60.0,
            headers={"Content-Type": "application/json"},
        )
        assert json.loads(answer.payload)["failed"] == "wake: the worker is awake"
