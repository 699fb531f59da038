"""The whole worker as a process, on a real NATS, with real ZMQ events."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import pytest

from services.worker.__main__ import check_files
from services.worker.config import Dtype, SimulatedConfig, WorkerConfig
from shared import subjects
from shared.bus.contract import Bus
from shared.bus.nats_bus import connect
from shared.bus.zmq_events import ZmqEventBus
from shared.config import NatsConfig
from shared.discovery.contract import Discovery, KeyAdded, KeyRemoved, LeftOut, Synced
from shared.discovery.file import FileDiscovery
from shared.errors import ConfigError, ModelError
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.generate import Accepted
from shared.messages.kv_events import EVENT_BATCH, AllBlocksCleared
from tests.tiny_model import write_tiny_model
from tests.worker.native.gguf_model import write_gguf
from tests.worker.shell import EOS, LIMIT_S, NAMESPACE, Peer, request, write_model

PROMPT = list(range(10, 50))


async def test_a_worker_process_serves_over_nats_and_drains_on_sigterm(nats_url: str, tmp_path: Path) -> None:
    settings = tmp_path / "worker.toml"
    settings.write_text(
        f'namespace = "{NAMESPACE}"\nmodel = "{write_model(tmp_path / "model")}"\nengine = "echo"\n'
        f'[nats]\nurl = "{nats_url}"\n[discovery]\nbackend = "file"\npath = "{tmp_path / "discovery"}"\n',
        encoding="utf-8",
    )
    discovery = FileDiscovery(tmp_path / "discovery")
    bus = await connect(NatsConfig(url=nats_url), "test")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.worker", "--config", str(settings))
    try:
        async with asyncio.timeout(LIMIT_S):
            await follow(process, discovery, bus)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await discovery.close()
        await bus.drain()


async def follow(process: asyncio.subprocess.Process, discovery: Discovery, bus: Bus) -> None:
    """Until every key that the worker published is gone again."""
    keys: set[str] = set()
    told = False
    instance: Instance | None = None
    async for change in discovery.watch(subjects.namespace_prefix(NAMESPACE)):
        match change:
            case KeyAdded(key, value):
                keys.add(key)
                if key.startswith(subjects.instances_prefix(NAMESPACE)):
                    instance = INSTANCE.decode(value, JSON_HEADER)
            case KeyRemoved(key):
                keys.remove(key)
            case Synced() | LeftOut():
                pass
            case _:
                assert_never(change)
        if instance is not None and len(keys) == 2 and not told:
            await serve_one(bus, instance)
            process.send_signal(signal.SIGTERM)
            told = True
        if told and not keys:
            return


async def serve_one(bus: Bus, instance: Instance) -> None:
    """One request; the KV events it made come by replay."""
    peer = Peer(bus, worker=instance.instance)
    await peer.open()
    assert await peer.generate(request("r", PROMPT)) == Accepted("r", 1)
    assert await peer.ended("r") == "stop"
    assert peer.tokens("r") == [*PROMPT, EOS]
    assert instance.events is not None
    with ZmqEventBus() as events:
        subscription = events.subscribe(instance.events, peer.take_batch)
        batches = await subscription.replay(0, timeout_s=LIMIT_S)
        subscription.close()
    assert [sequence for sequence, _ in batches] == list(range(len(batches)))
    assert EVENT_BATCH.decode(batches[0][1]).events == [AllBlocksCleared()]
    assert len(batches) > 1


def config(model: Path, engine: str = "native", **settings: object) -> WorkerConfig:
    return WorkerConfig(model=str(model), engine=engine, cache=str(model.parent / "cache"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["native", "simulated", "echo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_can_be_served_passes_and_is_not_converted(tmp_path: Path, engine: str, dtype: Dtype) -> None:
    model = write_tiny_model(tmp_path / "model", dtype=dtype)
    check_files(config(model, engine))
    check_files(config(write_gguf(tmp_path / "sha256-0a1b", model), engine))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("engine", ["native", "simulated"])
@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", "{", "config.json: "),
        ("tokenizer.json", "{}", "tokenizer.json: "),
        ("tokenizer.json", None, "tokenizer.json: "),
        ("modules.json", "{", "modules.json: "),
    ],
)
def test_a_file_that_would_not_do_is_named(
    tmp_path: Path, engine: str, file: str, content: str | None, complaint: str
) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / file).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_text(content)
    with pytest.raises(ModelError, match=complaint):
        check_files(config(model, engine))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace(file: Path) -> None:
    file.write_bytes(b"none")


@pytest.mark.parametrize("damage", [cut, replace])
def test_torn_weights_are_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    model = write_tiny_model(tmp_path / "model")
    gguf = write_gguf(tmp_path / "x.gguf", model)
    damage(gguf)
    with pytest.raises(ModelError, match=r"x\.gguf: torn or not a GGUF file"):
        check_files(config(gguf))
    damage(model / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: torn"):
        check_files(config(model))


def test_a_table_of_times_is_read(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        check_files(config(model, "simulated", simulated=SimulatedConfig(table=str(tmp_path / "none.toml"))))


def test_a_worker_that_is_asked_to_check_ends_with_a_status_and_needs_no_nats(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    ask = (sys.executable, "-m", "services.worker", "--nats-url", "nats://127.0.0.1:1", "--model", str(model))
    assert subprocess.run((*ask, "--check"), check=False, capture_output=True).returncode == 0
    (model / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    asked = subprocess.run((*ask, "--check"), check=False, capture_output=True, text=True)
    assert asked.returncode == 2
    assert asked.stderr.startswith(f"headrace-worker: {model}/config.json: architecture GPT2LMHeadModel is not supp")
    assert asked.stderr.count("\n") == 1
    assert subprocess.run((*ask, "--check-settings"), check=False, capture_output=True).returncode == 0


def test_sizes_of_vllm_that_do_not_divide_the_model_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden=128, heads=2)
    file = tmp_path / "vllm.yaml"
    file.write_text("tensor-parallel-size: 4\n")
    with pytest.raises(
        ConfigError, match=r"^vllm_args\.tensor-parallel-size: 4 does not divide the model's 2 attention"
    ):
        check_files(WorkerConfig(model=str(model), engine="vllm", vllm_args=str(file)))
    check_files(WorkerConfig(model=str(model), engine="vllm", vllm_args=str(file), vllm={"tensor_parallel_size": "2"}))
