"""The engine as a real process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from services.kvbm.tickets.results import TicketLimits
from services.worker import engine_main
from services.worker.config import (
    CudaConfig,
    Dtype,
    EngineConfig,
    HealthConfig,
    KVConnectorConfig,
    SimulatedConfig,
    WorkerConfig,
)
from services.worker.contracts.messages import (
    FIRST_TOKENS,
    EngineOperation,
    EngineReport,
    Exchanged,
    Failed,
    KvbmAsks,
    KvbmLink,
    Loading,
    MemoryUse,
    Probed,
    ProbeDevice,
    Ready,
    Snapshot,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.contracts.mover import Copy
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.process import EngineProcess
from services.worker.engine_main import _first, _load, _wake, embeddings_layout
from services.worker.transfer.errors import DeviceFailed
from services.worker.transfer.host_copier import HostCopier
from shared.blocks import Content
from shared.config import ObserveConfig
from shared.errors import ModelError
from shared.hashing import ContentKey, pack_tokens, unpack_tokens
from shared.messages.cards import ImageInput, KvLayout
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared
from shared.messages.kvbm import StoreLayout
from shared.pool.map import PoolMap
from tests.tiny_model import write_tiny_model
from tests.worker.drawer_socket import listening
from tests.worker.fake_runner import FakeRunner
from tests.worker.kvbm_drawer import Drawer
from tests.worker.pool_file import make_pool
from tests.worker.shell import LIMIT_S, write_model


def echo(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(model=str(write_model(tmp_path / "model")), engine="echo", capacity_blocks=64)


def simulated(tmp_path: Path, **times: float | str) -> WorkerConfig:
    model = str(write_model(tmp_path / "model"))
    settings = msgspec.convert(times, SimulatedConfig)
    return WorkerConfig(model=model, engine="simulated", capacity_blocks=64, simulated=settings)


async def ready(engine: EngineProcess) -> Ready:
    async with asyncio.timeout(LIMIT_S):
        report: EngineReport = Loading("", 0.0)
        while isinstance(report, Loading):
            report = await engine.receive()
    assert isinstance(report, Ready), report
    return report


async def answer(
    engine: EngineProcess,
    prompt: list[int],
    max_tokens: int,
    steps: list[Stepped] | None = None,
    store: Store | None = None,
    lora: str = "",
) -> list[Part]:
    submit = Submit(
        request="r",
        attempt=1,
        frontend="f",
        tokens=pack_tokens(prompt),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        time_left_s=60.0,
        lora=lora,
    )
    assert engine.submit(submit)
    parts: list[Part] = []
    async with asyncio.timeout(LIMIT_S):
        while not parts or parts[-1].finish is None:
            report = await engine.receive()
            if isinstance(report, MemoryUse) or (store is not None and isinstance(report, KvbmAsks | KvbmLink)):
                continue
            assert isinstance(report, Stepped), report
            parts += report.parts.get("f", [])
            if store is not None:
                store.exchanged = report.exchanged or store.exchanged
            if steps is not None:
                steps.append(report)
    return parts


class Store:
    """A kvbm in a drawer, and what an engine has exchanged with it."""

    def __init__(self, directory: Path, facts: Ready) -> None:
        self.directory = directory
        self._layout = StoreLayout(model="tiny", weights=facts.weights, kv=facts.kv_layout)
        self._disk: dict[ContentKey, tuple[Content, bytes]] = {}
        self._kvbms = 0
        self.exchanged = Exchanged()
        """The totals that an engine reported last."""
        self.drawer = self._open()

    def _open(self) -> Drawer:
        self._kvbms += 1
        return Drawer(
            self.directory, f"k{self._kvbms}", self._layout, TicketLimits(), self._disk, pool_bytes=self._pool_bytes
        )

    @property
    def _pool_bytes(self) -> int:
        return 64 * max(self._layout.kv.block_bytes, 1 << 14)

    def restart(self) -> None:
        """What is in memory is lost, all of it was written to disk."""
        self.drawer.spill(999)
        self.drawer.close()
        self.drawer = self._open()

    async def linked(self, engine: EngineProcess) -> None:
        """Wait until the engine exchanges blocks."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                match await engine.receive():
                    case KvbmLink(kvbm) if kvbm == self.drawer.name:
                        return
                    case _:
                        pass

    async def saved(self, engine: EngineProcess, blocks: int) -> None:
        """Wait until the engine has reported `blocks` stored blocks, perhaps while it answered."""
        async with asyncio.timeout(LIMIT_S):
            while self.exchanged.saved_blocks < blocks:
                match await engine.receive():
                    case Stepped(exchanged=Exchanged() as exchanged):
                        self.exchanged = exchanged
                    case _:
                        pass


async def test_it_gets_ready_answers_and_ends_on_shutdown(tmp_path: Path) -> None:
    engine = await EngineProcess.start(echo(tmp_path), "model", "w1")
    facts = await ready(engine)
    assert facts.capacity_blocks == 64
    assert facts.path == str(tmp_path / "model")
    parts = await answer(engine, [5, 6, 7], 3)
    assert [token for part in parts for token in unpack_tokens(part.tokens)] == [5, 6, 7]
    assert await engine.end(LIMIT_S) == 0


async def test_a_simulated_engine_takes_its_time_and_says_the_prompt(tmp_path: Path) -> None:
    engine = await EngineProcess.start(simulated(tmp_path, weights_s=0.01, context_length=100), "model", "w1")
    assert (await ready(engine)).context_length == 100
    steps: list[Stepped] = []
    parts = await answer(engine, [5, 6, 7], 4, steps)
    assert [token for part in parts for token in unpack_tokens(part.tokens)] == [5, 6, 7, 5]
    assert all(step.elapsed_s >= 0.01 for step in steps if step.tokens)
    assert await engine.end(LIMIT_S) == 0


async def test_a_bad_table_of_times_is_named(tmp_path: Path) -> None:
    table = tmp_path / "times.toml"
    table.write_text("decode = []", encoding="utf-8")
    engine = await EngineProcess.start(simulated(tmp_path, table=str(table)), "model", "w1")
    report = await engine.receive()
    assert isinstance(report, Failed)
    assert report.model
    assert "times.toml" in report.reason
    assert await engine.end(LIMIT_S) == 1


async def test_a_stopped_engine_is_killed_at_the_limit(tmp_path: Path) -> None:
    engine = await EngineProcess.start(echo(tmp_path), "model", "w1")
    await ready(engine)
    os.kill(engine.pid, signal.SIGSTOP)
    assert await engine.end(0.05) == -signal.SIGKILL


async def test_interrupts_meant_for_the_shell_do_not_end_it(tmp_path: Path) -> None:
    engine = await EngineProcess.start(echo(tmp_path), "model", "w1")
    await ready(engine)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, number)
    assert len(await answer(engine, [5, 6, 7], 2)) == 2
    assert await engine.end(LIMIT_S) == 0


async def test_a_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    config = msgspec.structs.replace(echo(tmp_path), model=str(tmp_path))
    engine = await EngineProcess.start(config, "model", "w1")
    report = await engine.receive()
    assert isinstance(report, Failed)
    assert report.model
    assert "config.json" in report.reason
    with pytest.raises(ChannelClosed):
        await engine.receive()
    assert await engine.end(LIMIT_S) == 1


async def test_what_it_logs_is_one_line_in_the_form_of_its_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    config = replace(echo(tmp_path), observe=ObserveConfig(log_format="json", log_level="debug"))
    engine = await EngineProcess.start(config, "tiny", "w1", module="tests.worker.breaking_engine")
    try:
        async with asyncio.timeout(LIMIT_S):
            failed = await engine.receive()
        assert failed == Failed(reason="RuntimeError: weights\nof two lines")
    finally:
        await engine.end(LIMIT_S)
    [line] = capfd.readouterr().err.splitlines()
    record = json.loads(line)
    assert [record[name] for name in ("service", "instance", "model", "level")] == ["worker", "w1", "tiny", "error"]
    assert record["message"] == "the model cannot be loaded"
    assert "RuntimeError" in record["traceback"]


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    config = msgspec.json.encode(echo(tmp_path)).decode()
    program = (
        "import asyncio, sys, msgspec\n"
        "from services.worker.config import WorkerConfig\n"
        "from services.worker.engine.process import EngineProcess\n"
        "async def main():\n"
        "    engine = await EngineProcess.start(msgspec.json.decode(sys.argv[1], type=WorkerConfig), 'model', 'w1')\n"
        "    await engine.receive()\n"
        "    print(engine.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, config], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        handle = os.pidfd_open(pid)
        shell.kill()
        ended, _, _ = select.select([handle], [], [], LIMIT_S)
        os.close(handle)
        assert ended


async def test_the_native_engine_repeats_itself_from_its_cache(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = WorkerConfig(
        model=str(model), cache=str(tmp_path / "cache"), engine="native", capacity_blocks=64, threads=1
    )
    engine = await EngineProcess.start(config, "tiny", "w1")
    facts = await ready(engine)
    assert facts.vocab_size == 320
    prompt = [position * 7 % 320 for position in range(100)]
    first = await answer(engine, prompt, 8)
    second = await answer(engine, prompt, 8)
    assert [part.tokens for part in first] == [part.tokens for part in second]
    assert first[-1].cached_tokens == 0
    assert second[-1].cached_tokens == 96
    assert await engine.end(LIMIT_S) == 0


def native(tmp_path: Path, **health: object) -> WorkerConfig:
    model = write_tiny_model(tmp_path / "tiny")
    settings = msgspec.convert(health, HealthConfig)
    where = {"model": str(model), "cache": str(tmp_path / "cache")}
    return msgspec.convert(
        {**where, "engine": "native", "capacity_blocks": 64, "threads": 1, "health": settings}, WorkerConfig
    )


async def test_the_native_engine_computes_its_first_tokens_before_it_is_ready_and_they_leave_nothing(
    tmp_path: Path,
) -> None:
    engine = await EngineProcess.start(native(tmp_path), "tiny", "w1")
    async with asyncio.timeout(LIMIT_S):
        reports: list[EngineReport] = [await engine.receive()]
        while not isinstance(reports[-1], Ready):
            reports.append(await engine.receive())
        assert reports[-2] == Loading(FIRST_TOKENS, 0.9)
        opening = await engine.receive()
        assert isinstance(opening, Stepped)
        assert (opening.steps, opening.tokens, opening.events) == (0, 0, [AllBlocksCleared()])
        engine.send(ProbeDevice((5, 6)))
        probed = await engine.receive()
        assert isinstance(probed, Stepped)
        assert (probed.steps, probed.tokens, probed.events, probed.parts) == (1, 0, [], {})
        assert (probed.load.cached_blocks, probed.load.held_blocks, probed.load.step_s) == (0, 0, 0.0)
        answered = await engine.receive()
        assert isinstance(answered, Probed)
        assert not answered.failed
        assert answered.took_s > 0
        engine.send(TakeEngineSnapshot(1))
        taken = await engine.receive()
        assert isinstance(taken, Snapshot)
        assert taken.blocks == []
    assert await engine.end(LIMIT_S) == 0


async def test_an_engine_that_cannot_compute_its_first_tokens_does_not_start_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATAL", "0 0 0 0")
    engine = await EngineProcess.start(native(tmp_path), "tiny", "w1", module="tests.gpu.breaking_engine")
    async with asyncio.timeout(LIMIT_S):
        report: EngineReport = Loading("", 0.0)
        while isinstance(report, Loading):
            report = await engine.receive()
    wrong = "the first tokens, 64 of a prompt and one after it, cannot be computed: the device has failed"
    assert report == Failed(reason=f"ModelError: {wrong}")
    assert await engine.end(LIMIT_S) == 1


async def test_a_probe_that_the_model_cannot_compute_is_named_by_its_setting(tmp_path: Path) -> None:
    engine = await EngineProcess.start(native(tmp_path, prompt=[400]), "tiny", "w1")
    async with asyncio.timeout(LIMIT_S):
        report: EngineReport = Loading("", 0.0)
        while isinstance(report, Loading):
            report = await engine.receive()
    assert report == Failed(reason="health.prompt: the model's tokens are 0 to 319, not 400", model=True)
    assert await engine.end(LIMIT_S) == 1


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
async def test_a_prompt_that_one_engine_computed_is_loaded_by_another_and_answered_the_same(
    tmp_path: Path, kv_dtype: Dtype
) -> None:
    config = WorkerConfig(
        model=str(write_tiny_model(tmp_path / "tiny")),
        cache=str(tmp_path / "cache"),
        capacity_blocks=64,
        threads=1,
        kv_dtype=kv_dtype,
        kvbm=KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=LIMIT_S),
    )
    prompt = [position * 7 % 320 for position in range(100)]
    first = await EngineProcess.start(config, "tiny", "w1")
    store = Store(tmp_path / "pool", await ready(first))
    async with listening(store.directory, store.drawer):
        await store.linked(first)
        computed = await answer(first, prompt, 8, store=store)
        await store.saved(first, 6)
        first.kill()
        second = await EngineProcess.start(config, "tiny", "w2")
        await ready(second)
        await store.linked(second)
        loaded = await answer(second, prompt, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
    second.kill()
    await first.end(LIMIT_S)
    await second.end(LIMIT_S)

    store.restart()
    async with listening(store.directory, store.drawer):
        third = await EngineProcess.start(config, "tiny", "w3")
        await ready(third)
        await store.linked(third)
        from_disk = await answer(third, prompt, 8, store=store)
        assert [part.tokens for part in from_disk] == [part.tokens for part in computed]
        assert (from_disk[-1].cached_tokens, from_disk[-1].cached_disk_tokens) == (96, 96)
        assert await third.end(LIMIT_S) == 0
    store.drawer.close()


def test_embeddings_that_were_computed_with_another_type_or_for_another_model_have_another_layout() -> None:
    config = WorkerConfig(model="m", kvbm=KVConnectorConfig(pool="p", embeddings=True), kv_dtype="bfloat16")
    shape = KvLayout("bfloat16", 1, 1, 4, 4)
    takes = ImageInput(319, 16, 28, 28, 28, "BICUBIC")
    facts = Ready(64, 320, (), 4, 8, shape, weights="w", images=takes, embedding_size=64)

    def digest(config: WorkerConfig, facts: Ready = facts, model: str = "m") -> str:
        layout = embeddings_layout(EngineConfig.of(config, model, "i", parent_pid=1), facts)
        assert layout is not None
        assert layout.kv.block_bytes == 4 * 16 * 64
        return layout.digest

    on_gpu = replace(config, device="cuda", cuda=CudaConfig(dtype="bfloat16"))
    exact = replace(config, device="cuda", cuda=CudaConfig(dtype="float32"), kv_dtype="auto")
    assert digest(config) == digest(replace(config, kv_dtype="float32")) == digest(exact) != digest(on_gpu)
    assert digest(config, model="other") != digest(config) != digest(config, replace(facts, weights="other"))
    for other in (replace(config, kvbm=KVConnectorConfig(pool="p")), config):
        without = replace(facts, images=None) if other is config else facts
        assert embeddings_layout(EngineConfig.of(other, "m", "i", parent_pid=1), without) is None


@pytest.mark.parametrize("verify", [True, False])
def test_blocks_are_compared_where_the_settings_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    monkeypatch.setattr(HostCopier, "differs", lambda _copier, copies: [True for _ in copies])  # the worst machine
    config = WorkerConfig(
        model=str(write_tiny_model(tmp_path / "tiny")),
        cache=str(tmp_path / "cache"),
        capacity_blocks=8,
        kvbm=KVConnectorConfig(verify=verify),
    )
    runner = _load(config, lambda _progress: None)
    geometry = make_pool(tmp_path / "pool", 1 << 20)
    slots = PoolMap(tmp_path / "pool").arena(geometry.arena(0, 1, runner.facts.kv_layout.block_bytes))
    mover = runner.mover(time.monotonic)
    mover.attach(slots)
    mover.load(1, [Copy(0, 0), Copy(1, 1)])
    assert select.select([mover], [], [], LIMIT_S)[0]
    [copied] = mover.ended()
    assert (copied.good, copied.differing) == (([False, False], 2) if verify else ([True, True], 0))
    mover.close()
    runner.close()


async def test_an_engine_without_kv_to_exchange_says_so(tmp_path: Path) -> None:
    config = msgspec.structs.replace(echo(tmp_path), kvbm=KVConnectorConfig(pool=str(tmp_path)))
    engine = await EngineProcess.start(config, "model", "w1")
    report = await engine.receive()
    assert isinstance(report, Failed)
    assert report.model
    assert "kvbm" in report.reason
    assert await engine.end(LIMIT_S) == 1


class Lost:
    """An engine that cannot be closed."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_wrong: object) -> None:
        try:
            raise RuntimeError("an illegal address")
        except RuntimeError as wrong:
            raise DeviceFailed("copies cannot be waited for") from wrong


def test_a_runners_failure_is_reported_where_it_makes_the_end_of_its_copies_fail() -> None:
    with pytest.raises(DeviceFailed) as caught, Lost():
        raise ModelError("the GPU failed: an illegal address")
    assert str(_first(caught.value)) == "the GPU failed: an illegal address"
    with pytest.raises(DeviceFailed) as caught, Lost():
        pass
    assert _first(caught.value) is caught.value


class _FilledDevice(FakeRunner):
    """A runner whose device has some of its memory back at each look, in all `frees` times. It can wake when it has all
    of it, if that is enough."""

    def __init__(self, frees: int, *, enough: bool) -> None:
        super().__init__(block_size=1, capacity_blocks=1, context_length=1)
        self.frees, self.enough, self.looks = frees, enough, 0

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        return "" if self.enough and self.looks >= self.frees else "wake: no memory"

    def memory_use(self) -> MemoryUse:
        self.looks += 1
        return MemoryUse(used=0, kept=0, others=0, free=min(self.looks, self.frees))


def test_a_standby_waits_for_memory_as_long_as_more_of_it_comes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_main, "WAKE_LIMIT_S", 0.0)
    words: list[int] = []
    device = _FilledDevice(5, enough=True)
    _wake(device, LIMIT_S, lambda: words.append(device.looks))
    assert words == [1, 2, 3, 4, 5], "the worker knows that it lives"
    with pytest.raises(ModelError, match="wake: no memory"):
        _wake(_FilledDevice(5, enough=False), LIMIT_S, lambda: None)
    with pytest.raises(ModelError, match="wake: no memory"):
        _wake(device := _FilledDevice(1 << 30, enough=True), 0.0, lambda: None)
    assert device.looks == 1
