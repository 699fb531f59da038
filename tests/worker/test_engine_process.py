"""The engine as a real process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.worker.channel import PeerGone
from services.worker.config import SimulatedConfig, WorkerConfig
from services.worker.engine import EngineReport, Failed, Loading, Ready, Stepped, Submit
from services.worker.engine_client import EngineClient
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages import Part, Sampling
from tests.tiny_model import write_tiny_model
from tests.worker.shell import LIMIT_S, write_model


def echo(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(model=str(write_model(tmp_path / "model")), engine="echo", capacity_blocks=64)


def simulated(tmp_path: Path, **times: float | str) -> WorkerConfig:
    model = str(write_model(tmp_path / "model"))
    settings = msgspec.convert(times, SimulatedConfig)
    return WorkerConfig(model=model, engine="simulated", capacity_blocks=64, simulated=settings)


async def ready(engine: EngineClient) -> Ready:
    async with asyncio.timeout(LIMIT_S):
        report: EngineReport = Loading("", 0.0)
        while isinstance(report, Loading):
            report = await engine.receive()
    assert isinstance(report, Ready), report
    return report


async def answer(
    engine: EngineClient, prompt: list[int], max_tokens: int, steps: list[Stepped] | None = None
) -> list[Part]:
    submit = Submit(
        request="r",
        attempt=1,
        frontend="f",
        tokens=pack_tokens(prompt),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        time_left_s=60.0,
    )
    assert engine.submit(submit)
    parts: list[Part] = []
    async with asyncio.timeout(LIMIT_S):
        while not parts or parts[-1].finish is None:
            report = await engine.receive()
            assert isinstance(report, Stepped), report
            parts += report.parts.get("f", [])
            if steps is not None:
                steps.append(report)
    return parts


async def test_it_gets_ready_answers_and_ends_on_shutdown(tmp_path: Path) -> None:
    engine = await EngineClient.start(echo(tmp_path), "model", "w1")
    facts = await ready(engine)
    assert facts.capacity_blocks == 64
    assert facts.path == str(tmp_path / "model")
    parts = await answer(engine, [5, 6, 7], 3)
    assert [token for part in parts for token in unpack_tokens(part.tokens)] == [5, 6, 7]
    assert await engine.end(LIMIT_S) == 0


async def test_a_simulated_engine_takes_its_time_and_says_the_prompt(tmp_path: Path) -> None:
    engine = await EngineClient.start(simulated(tmp_path, weights_s=0.01, context_length=100), "model", "w1")
    assert (await ready(engine)).context_length == 100
    steps: list[Stepped] = []
    parts = await answer(engine, [5, 6, 7], 4, steps)
    assert [token for part in parts for token in unpack_tokens(part.tokens)] == [5, 6, 7, 5]
    assert all(step.elapsed_s >= 0.01 for step in steps if step.tokens)
    assert await engine.end(LIMIT_S) == 0


async def test_a_bad_table_of_times_is_named(tmp_path: Path) -> None:
    table = tmp_path / "times.toml"
    table.write_text("decode = []", encoding="utf-8")
    engine = await EngineClient.start(simulated(tmp_path, table=str(table)), "model", "w1")
    report = await engine.receive()
    assert isinstance(report, Failed)
    assert report.model
    assert "times.toml" in report.reason
    assert await engine.end(LIMIT_S) == 1


async def test_a_stopped_engine_is_killed_at_the_limit(tmp_path: Path) -> None:
    engine = await EngineClient.start(echo(tmp_path), "model", "w1")
    await ready(engine)
    os.kill(engine.pid, signal.SIGSTOP)
    assert await engine.end(0.05) == -signal.SIGKILL


async def test_interrupts_meant_for_the_shell_do_not_end_it(tmp_path: Path) -> None:
    engine = await EngineClient.start(echo(tmp_path), "model", "w1")
    await ready(engine)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, number)
    assert len(await answer(engine, [5, 6, 7], 2)) == 2
    assert await engine.end(LIMIT_S) == 0


async def test_a_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    config = msgspec.structs.replace(echo(tmp_path), model=str(tmp_path))
    engine = await EngineClient.start(config, "model", "w1")
    report = await engine.receive()
    assert isinstance(report, Failed)
    assert report.model
    assert "config.json" in report.reason
    with pytest.raises(PeerGone):
        await engine.receive()
    assert await engine.end(LIMIT_S) == 1


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    config = msgspec.json.encode(echo(tmp_path)).decode()
    program = (
        "import asyncio, sys, msgspec\n"
        "from services.worker.config import WorkerConfig\n"
        "from services.worker.engine_client import EngineClient\n"
        "async def main():\n"
        "    engine = await EngineClient.start(msgspec.json.decode(sys.argv[1], type=WorkerConfig), 'model', 'w1')\n"
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
    engine = await EngineClient.start(config, "tiny", "w1")
    facts = await ready(engine)
    assert facts.vocab_size == 320
    prompt = [position * 7 % 320 for position in range(100)]
    first = await answer(engine, prompt, 8)
    second = await answer(engine, prompt, 8)
    assert [part.tokens for part in first] == [part.tokens for part in second]
    assert first[-1].cached_tokens == 0
    assert second[-1].cached_tokens == 96
    assert await engine.end(LIMIT_S) == 0
