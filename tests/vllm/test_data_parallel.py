"""A vLLM engine with two data-parallel ranks, through its channel."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from functools import reduce
from operator import xor
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from services.worker.config import WorkerConfig
from shared.messages.generate import Sampling
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.environment import PYTHON, needs_gpus, needs_vllm

BLOCK = 32
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
pytestmark = [needs_vllm, needs_gpus(2), pytest.mark.asyncio(loop_scope="module")]


def prompt_of(number: int, length: int = 3 * BLOCK + 5) -> list[int]:
    return [5 + (number * 37 + index * (1 + number % 5)) % 250 for index in range(length)]


async def started(directory: Path, **arguments: object) -> DrivenEngine:
    model = write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3)
    common = {"num_gpu_blocks_override": 64, "enforce_eager": True, "dtype": "float32", "data_parallel_size": 2}
    given = {"model": str(model), "engine": "vllm", "max_running": 4, "vllm_python": str(PYTHON), "threads": 1}
    return await DrivenEngine.start(msgspec.convert(given | {"vllm": common | arguments}, WorkerConfig))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DrivenEngine]:
    driven = await started(tmp_path_factory.mktemp("model") / "tiny", enable_lora=True, max_lora_rank=8)
    yield driven
    await driven.close()


async def test_it_serves_two_ranks_with_blocks_of_their_own(engine: DrivenEngine) -> None:
    assert (engine.facts.ranks, engine.facts.capacity_blocks) == (2, 64)


async def test_each_rank_computes_its_attempts_and_finds_its_own_blocks(engine: DrivenEngine) -> None:
    answers = [await engine.answer(f"cold-{rank}", prompt_of(1), GREEDY, rank=rank) for rank in (0, 1)]
    assert answers[0] == answers[1]
    assert [engine.parts[f"cold-{rank}"][0].cached_tokens for rank in (0, 1)] == [0, 0]
    await engine.answer("other", prompt_of(2), GREEDY, rank=1)
    await engine.answer("warm", prompt_of(2), GREEDY, rank=1)
    await engine.answer("cold", prompt_of(2), GREEDY, rank=0)
    assert engine.parts["warm"][0].cached_tokens == 3 * BLOCK
    assert engine.parts["cold"][0].cached_tokens == 0


async def test_events_digests_and_snapshots_agree_by_rank(engine: DrivenEngine) -> None:
    await engine.answer("more", prompt_of(3), GREEDY, rank=1)
    for rank in (0, 1):
        snapshot = await engine.snapshot(rank)
        hashes = {block.hash for block in snapshot.blocks}
        assert reduce(xor, engine.published_at[rank], 0) == engine.digest_of[rank]
        assert hashes == engine.published_at[rank]
        assert snapshot.event_sequence == engine.event_sequence
    assert engine.published_at[0] != engine.published_at[1]


async def test_attempts_at_both_ranks_are_cancelled(engine: DrivenEngine) -> None:
    long = msgspec.structs.replace(GREEDY, max_tokens=800)
    for rank in (0, 1):
        engine.submit(f"long-{rank}", prompt_of(4), long, rank=rank)
    await engine.until(lambda: all(engine.parts.get(f"long-{rank}") for rank in (0, 1)))
    for rank in (0, 1):
        engine.cancel(f"long-{rank}")
        assert (await engine.ended(f"long-{rank}")).finish == "cancelled"


async def test_clearing_empties_both_ranks(engine: DrivenEngine) -> None:
    assert all(engine.published_at[rank] for rank in (0, 1))
    assert await engine.operate("clear") == ""
    for rank in (0, 1):
        kept = {block.hash for block in (await engine.snapshot(rank)).blocks}
        assert kept == engine.published_at[rank] == set()
        assert engine.digest_of[rank] == 0


async def test_each_rank_loads_a_lora_sleeps_and_wakes(engine: DrivenEngine, tmp_path: Path) -> None:
    plain = await engine.answer("plain", prompt_of(5), GREEDY, rank=0)
    lora = write_lora(tmp_path / "lora", Path(engine.facts.path))
    assert await engine.operate("load_lora", name="poet@1", path=str(lora)) == ""
    first, second = [
        await engine.answer(f"lora-{rank}", prompt_of(5), GREEDY, rank=rank, lora="poet@1") for rank in (0, 1)
    ]
    assert first == second != plain
    assert await engine.operate("sleep") == ""
    for rank in (0, 1):
        assert engine.published_at[rank] == set()
        engine.submit(f"asleep-{rank}", prompt_of(5), GREEDY, rank=rank)
        assert (await engine.ended(f"asleep-{rank}")).error == "the engine is asleep"
    assert await engine.operate("wake") == ""
    for rank in (0, 1):
        assert await engine.answer(f"again-{rank}", prompt_of(5), GREEDY, rank=rank, lora="poet@1") == first
        assert await engine.answer(f"base-{rank}", prompt_of(5), GREEDY, rank=rank) == plain
    assert await engine.operate("unload_lora", name="poet@1") == ""


async def test_the_end_of_one_ranks_core_ends_the_engine(engine: DrivenEngine) -> None:
    def cores() -> list[int]:
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getpgid(int(entry.name)) == engine.process.pid:
                    name = (entry / "cmdline").read_bytes()
                    found += [int(entry.name)] * (b"EngineCore_DP1" in name)
            except (ProcessLookupError, FileNotFoundError):
                pass
        return found

    [core] = cores()
    os.kill(core, signal.SIGKILL)
    await engine.until(lambda: engine.gone)
    assert engine.failed


async def test_each_rank_makes_embeddings(tmp_path: Path) -> None:
    engine = await started(tmp_path / "tiny", runner="pooling", pooler_config={"pooling_type": "MEAN"})
    try:
        assert (engine.facts.ranks, engine.facts.embedding_size) == (2, 128)
        for rank in (0, 1):
            engine.submit(f"embed-{rank}", prompt_of(rank), Sampling(max_tokens=1, pooling="mean"), rank=rank)
        parts = [await engine.ended(f"embed-{rank}") for rank in (0, 1)]
        assert [(part.finish, len(part.embedding)) for part in parts] == [("stop", 4 * 128)] * 2
    finally:
        await engine.close()
