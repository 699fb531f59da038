"""A native engine of several ranks as real processes: its answers, its blocks in the store, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.worker.__main__ import check_files
from services.worker.config import KVConnectorConfig, WeightsConfig, WorkerConfig
from services.worker.contracts.messages import (
    EngineOperation,
    Failed,
    KvbmAsks,
    KvbmLink,
    Loading,
    MemoryUse,
    Operate,
    Operated,
    Ready,
    Stepped,
)
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.process import EngineProcess, engine_environment
from shared.errors import ModelError
from tests.integration.stack import eventually
from tests.process_tree import children
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.drawer_socket import listening
from tests.worker.shell import LIMIT_S
from tests.worker.test_engine_main import Store, answer, ready

PROMPT = [position * 7 % 320 for position in range(100)]


def config_of(tmp_path: Path, ranks: int, **model: object) -> WorkerConfig:
    directory = tmp_path / "tiny"
    if not directory.exists():
        write_tiny_model(directory, **model)  # type: ignore[arg-type]
    return WorkerConfig(
        model=str(directory), cache=str(tmp_path / "cache"), capacity_blocks=64, threads=2, tensor_parallel=ranks
    )


def ended_ranks(pids: list[int]) -> None:
    """Wait until these processes are gone."""
    living = [Path(f"/proc/{pid}") for pid in pids]
    eventually(lambda: not any(each.exists() for each in living), limit_s=LIMIT_S, what="the ranks have ended")


async def failure(engine: EngineProcess) -> str:
    """Return why an engine failed."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            match await engine.receive():
                case Failed(reason=reason, model=model):
                    assert not model, "another engine is started"
                    return reason
                case report:
                    assert isinstance(report, Loading | Ready | Stepped)


@pytest.mark.parametrize("kv_heads", [2, 1])
async def test_greedy_answers_of_two_ranks_are_those_of_one(tmp_path: Path, kv_heads: int) -> None:
    said = []
    for ranks in (1, 2):
        engine = await EngineProcess.start(config_of(tmp_path, ranks, kv_heads=kv_heads), "tiny", "w1")
        await ready(engine)
        pids = children(engine.pid)
        assert len(pids) == ranks - 1
        said.append([part.tokens for part in await answer(engine, PROMPT, 24)])
        said.append([part.tokens for part in await answer(engine, PROMPT, 24)])
        assert await engine.end(LIMIT_S) == 0
        ended_ranks(pids)
    assert said[1:] == said[:1] * 3


async def test_blocks_that_two_ranks_stored_are_loaded_by_one_and_back(tmp_path: Path) -> None:
    kvbm = KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=LIMIT_S)
    other = [position * 3 % 320 for position in range(100)]
    two = await EngineProcess.start(replace(config_of(tmp_path, 2), kvbm=kvbm), "tiny", "w1")
    store = Store(tmp_path / "pool", await ready(two))
    async with listening(store.directory, store.drawer):
        await store.linked(two)
        computed = await answer(two, PROMPT, 8, store=store)
        await store.saved(two, 6)
        one = await EngineProcess.start(replace(config_of(tmp_path, 1), kvbm=kvbm), "tiny", "w2")
        await ready(one)
        await store.linked(one)
        loaded = await answer(one, PROMPT, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
        computed = await answer(one, other, 8, store=store)
        store.exchanged = replace(store.exchanged, saved_blocks=0)
        await store.saved(one, 6)
        loaded = await answer(two, other, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
        assert await two.end(LIMIT_S) == 0
        assert await one.end(LIMIT_S) == 0
    store.drawer.close()


async def operated(engine: EngineProcess, operation: EngineOperation, name: str = "", path: str = "") -> str:
    """Have an engine do an operation, sleep at level 2; return why it was not done."""
    engine.send(Operate(1, operation, name, path, level=2))
    async with asyncio.timeout(LIMIT_S):
        while True:
            report = await engine.receive()
            if isinstance(report, Operated):
                return report.failed
            assert isinstance(report, Stepped | MemoryUse | KvbmLink | KvbmAsks), report


async def test_blocks_of_a_lora_are_stored_by_two_ranks_and_loaded_by_one_with_the_same(tmp_path: Path) -> None:
    kvbm = KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=LIMIT_S)
    config = config_of(tmp_path, 2, tied=False)
    lora = write_lora(tmp_path / "lora", Path(config.model))
    two = await EngineProcess.start(replace(config, kvbm=kvbm), "tiny", "w1")
    store = Store(tmp_path / "pool", await ready(two))
    async with listening(store.directory, store.drawer):
        await store.linked(two)
        assert await operated(two, "load_lora", "poet", str(lora)) == ""
        computed = await answer(two, PROMPT, 8, store=store, lora="poet")
        await store.saved(two, 6)
        one = await EngineProcess.start(replace(config_of(tmp_path, 1), kvbm=kvbm), "tiny", "w2")
        await ready(one)
        await store.linked(one)
        assert await operated(one, "load_lora", "poet", str(lora)) == ""
        plain = await answer(one, PROMPT, 8, store=store)
        assert (plain[-1].cached_tokens, plain[-1].cached_host_tokens) == (0, 0)
        loaded = await answer(one, PROMPT, 8, store=store, lora="poet")
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert [part.tokens for part in loaded] != [part.tokens for part in plain]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
        assert await two.end(LIMIT_S) == 0
        assert await one.end(LIMIT_S) == 0
    store.drawer.close()


async def test_an_engine_of_two_ranks_exchanges_blocks_after_it_has_slept(tmp_path: Path) -> None:
    kvbm = KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=LIMIT_S)
    two = await EngineProcess.start(replace(config_of(tmp_path, 2), kvbm=kvbm), "tiny", "w1")
    store = Store(tmp_path / "pool", await ready(two))
    async with listening(store.directory, store.drawer):
        await store.linked(two)
        computed = await answer(two, PROMPT, 8, store=store)
        await store.saved(two, 6)
        assert await operated(two, "sleep") == ""
        assert await operated(two, "wake") == ""
        await store.linked(two)
        loaded = await answer(two, PROMPT, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
        assert await two.end(LIMIT_S) == 0
    store.drawer.close()


async def test_an_engine_whose_rank_is_killed_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    engine = await EngineProcess.start(config_of(tmp_path, 2), "tiny", "w1")
    await ready(engine)
    [rank] = children(engine.pid)
    answering = asyncio.ensure_future(answer(engine, PROMPT, 800))
    await asyncio.sleep(0)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(AssertionError, match="RankLost: tensor_parallel: rank 1 was killed by signal 9"):
        await answering
    with pytest.raises(ChannelClosed):
        await engine.receive()
    assert await engine.end(LIMIT_S) == 1
    ended_ranks([rank])


async def test_a_rank_that_is_killed_while_the_engine_starts_is_not_the_models_fault(tmp_path: Path) -> None:
    engine = await EngineProcess.start(config_of(tmp_path, 2), "tiny", "w1")
    ranks = eventually(lambda: children(engine.pid), limit_s=LIMIT_S, what="a rank")
    os.kill(ranks[0], signal.SIGKILL)
    assert "rank 1 was killed by signal 9" in await failure(engine)
    assert await engine.end(LIMIT_S) == 1
    ended_ranks(ranks)


async def test_killing_an_engine_ends_also_a_rank_that_stands_still(tmp_path: Path) -> None:
    engine = await EngineProcess.start(config_of(tmp_path, 2), "tiny", "w1")
    await ready(engine)
    [rank] = children(engine.pid)
    os.kill(rank, signal.SIGSTOP)
    engine.kill()
    assert await engine.end(LIMIT_S) == -signal.SIGKILL
    ended_ranks([rank])


async def test_ranks_map_weights_that_a_memory_service_would_keep_from_the_disk_without_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, dtype="bfloat16")
    weights = WeightsConfig(memory=str(tmp_path / "nothing"), timeout_s=0.1)
    engine = await EngineProcess.start(replace(config, weights=weights), "tiny", "w1")
    await ready(engine)
    assert len(await answer(engine, PROMPT, 4)) == 4
    assert await engine.end(LIMIT_S) == 0


def test_ranks_divide_the_threads_of_their_engine(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, 2), threads=5)
    assert engine_environment(config)["OPENBLAS_NUM_THREADS"] == "2"
    assert engine_environment(replace(config, threads=1))["OPENBLAS_NUM_THREADS"] == "1"


def test_the_check_before_a_start_names_heads_that_cannot_be_shared_out(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, heads=3, kv_heads=1, hidden=48)
    with pytest.raises(ModelError, match=r"^tensor_parallel is 2, but 3 attention heads and 1 key-value heads"):
        check_files(config)
    check_files(replace(config, tensor_parallel=1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine": "simulated"}, ", but engine is simulated; .* set tensor_parallel = 1"),
        ({"engine": "vllm"}, ", but engine is vllm; .* set vllm.tensor_parallel_size"),
        (
            {"device": "cuda", "role": "decode", "kvbm": KVConnectorConfig(pool="/p")},
            " on GPUs, but role is decode; .* set role = aggregated",
        ),
        ({"device": "cuda", "weights": WeightsConfig(memory="/m")}, " on GPUs, but weights.memory is set; .* empty"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^tensor_parallel is 2{named}$"):
        WorkerConfig(model="m", tensor_parallel=2, **settings)


def test_the_check_before_a_start_on_gpus_wants_as_many_heads_for_each_rank(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, 2, heads=6, kv_heads=3, hidden=96), device="cuda")
    said = r"^tensor_parallel is 2, but 6 attention heads and 3 key-value heads .*; possible are 1, 3, 6$"
    with pytest.raises(ModelError, match=said):
        check_files(config)
    check_files(replace(config, device="cpu"))
