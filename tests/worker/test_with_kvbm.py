"""A worker, its real engine process and a real kvbm: bytes through a real pool; only NATS and discovery are twins."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from services.worker.config import KVConnectorConfig, WorkerConfig
from services.worker.service import SHARES_NOTHING, SHARING_FAILS
from services.worker.sharing.packets import SHARERS
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.pool.format import HEADER_BYTES, parse
from tests.resource_limits import LIMIT_BYTES, small_files
from tests.tiny_model import write_tiny_model
from tests.worker.shell import NAMESPACE, WORKER, Shell, request, running_worker
from tests.worker.store import attached, saved, store

PROMPT = [position * 7 % 320 for position in range(100)]
BLOCKS = 6
"""Full ones of the prompt, of 16 tokens."""
MANY_BLOCKS = LIMIT_BYTES >> 10
"""Each takes more than 1 KiB."""


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        namespace=NAMESPACE,
        model=str(write_tiny_model(tmp_path / "model")),
        cache=str(tmp_path / "cache"),
        engine="native",
        capacity_blocks=64,
        threads=1,
        drain_s=1.0,
        kvbm=KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=20.0, timeout_s=4.0),
    )


async def answer(shell: Shell, name: str) -> tuple[list[int], Part]:
    """The tokens, and the last part."""
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    await shell.peer.generate(request(name, PROMPT, sampling=sampling))
    assert await shell.peer.ended(name) == "length"
    return shell.peer.tokens(name), shell.peer.parts(name)[-1]


async def test_what_an_engine_computed_the_next_one_gets_from_kvbm_after_a_crash(config: WorkerConfig) -> None:
    async with running_worker(config) as shell, store(shell, config.kvbm.pool, "k1"):
        await attached(shell, "k1")
        said, first = await answer(shell, "first")
        assert first.cached_tokens == 0
        await saved(shell, BLOCKS)
        assert shell.worker.engine.pid is not None
        os.kill(shell.worker.engine.pid, signal.SIGKILL)
        await shell.peer.until(lambda: ("model", WORKER) not in shell.directory.cards)
        await attached(shell, "k1")
        again, second = await answer(shell, "second")
        assert again == said
        assert (second.cached_tokens, second.cached_host_tokens) == (16 * BLOCKS, 16 * BLOCKS)
        _, third = await answer(shell, "third")
        assert (third.cached_tokens, third.cached_host_tokens) == (16 * BLOCKS, 0), "it is on the device by now"


@pytest.mark.parametrize("shares_blocks", [True, False])
async def test_a_prefill_worker_whose_memory_cannot_be_shared_serves_and_says_so(
    config: WorkerConfig, shares_blocks: bool
) -> None:
    kvbm = msgspec.structs.replace(config.kvbm, lending=shares_blocks)
    config = msgspec.structs.replace(config, role="prefill", capacity_blocks=MANY_BLOCKS, kvbm=kvbm)
    async with AsyncExitStack() as opened:
        with small_files():
            shell = await opened.enter_async_context(running_worker(config))
            await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        await answer(shell, "first")
        assert shell.runtime.health.also().get("notes", []) == ([SHARES_NOTHING] if shares_blocks else [])


@pytest.fixture
def in_the_way(config: WorkerConfig) -> Path:
    """A file where the directory of the sockets of sharers would be."""
    pool = Path(config.kvbm.pool)
    pool.mkdir(mode=0o700)
    file = pool / SHARERS
    file.touch()
    return file


async def test_a_prefill_worker_that_cannot_open_its_socket_says_so_until_it_can(
    config: WorkerConfig, in_the_way: Path
) -> None:
    async with (
        running_worker(msgspec.structs.replace(config, role="prefill")) as shell,
        store(shell, config.kvbm.pool, "k1"),
    ):
        await attached(shell, "k1")
        await shell.peer.until(lambda: shell.runtime.health.also().get("notes") == [SHARING_FAILS])
        await answer(shell, "first")
        await asyncio.to_thread(in_the_way.unlink)
        await shell.peer.until(lambda: "notes" not in shell.runtime.health.also())
        counted = partial(shell.runtime.registry.get_sample_value, "headrace_lending_failures_total")
        await shell.peer.until(lambda: (counted() or 0) > 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_whose_memory_can_be_shared_has_nothing_to_say(
    config: WorkerConfig, role: Literal["prefill", "decode"]
) -> None:
    async with running_worker(msgspec.structs.replace(config, role=role)) as shell:
        await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        assert "notes" not in shell.runtime.health.also()


async def test_a_damaged_block_whose_numbers_are_finite_is_seen_by_its_checksum_and_computed(
    config: WorkerConfig,
) -> None:
    config = msgspec.structs.replace(config, kvbm=msgspec.structs.replace(config.kvbm, checksums=True))
    async with running_worker(config) as shell, store(shell, config.kvbm.pool, "k1"):
        await attached(shell, "k1")
        said, _ = await answer(shell, "first")
        await saved(shell, BLOCKS)
        assert shell.worker.engine.pid is not None
        os.kill(shell.worker.engine.pid, signal.SIGKILL)
        await shell.peer.until(lambda: ("model", WORKER) not in shell.directory.cards)
        turn_signs(Path(config.kvbm.pool) / "pool")
        await attached(shell, "k1")
        again, second = await answer(shell, "second")
        assert (again, second.cached_host_tokens) == (said, 0)
        counted = partial(shell.runtime.registry.get_sample_value, "headrace_kvbm_damaged_blocks_total")
        await shell.peer.until(lambda: (counted() or 0) > 0)
        assert shell.runtime.registry.get_sample_value(
            "headrace_not_finite_sequences_total", {"outcome": "recomputed"}
        ) in (0, None)


async def test_the_health_of_a_worker_with_a_role_says_why_no_prompt_is_handed_over(config: WorkerConfig) -> None:
    decode = msgspec.structs.replace(config, role="decode")
    async with running_worker(decode) as shell:
        await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        await shell.peer.until(lambda: decode.kvbm.pool in shell.runtime.health.also()["no_hand_over"][0])
        async with store(shell, decode.kvbm.pool, "k1"):
            await attached(shell, "k1")
            assert "no_hand_over" not in shell.runtime.health.also()
    async with running_worker(config) as shell:
        await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        assert "no_hand_over" not in shell.runtime.health.also(), "an aggregated worker needs no kvbm"


async def test_blocks_are_exchanged_with_a_kvbm_of_another_namespace_and_a_note_says_so(config: WorkerConfig) -> None:
    async with running_worker(config) as shell, store(shell, config.kvbm.pool, "k1", namespace="other"):
        await attached(shell, "k1")
        [note] = shell.runtime.health.also()["notes"]
        assert "kvbm k1 of namespace other" in note
        await answer(shell, "first")
        await saved(shell, BLOCKS)


def turn_signs(pool: Path) -> None:
    """Turn the sign of every number in the slots; all stay finite."""
    with pool.open("r+b") as file:
        geometry = parse(file.read(HEADER_BYTES), pool.stat().st_size)
        file.seek(geometry.slots_at)
        slots = bytearray(file.read())
        slots[3::4] = bytes(byte ^ 0x80 for byte in slots[3::4])
        file.seek(geometry.slots_at)
        file.write(slots)


async def test_a_worker_outlives_its_kvbm_and_uses_the_next_one(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        said, _ = await answer(shell, "before")
        async with store(shell, config.kvbm.pool, "k1"):
            await attached(shell, "k1")
            await saved(shell, BLOCKS)
        await attached(shell, "")
        between, _ = await answer(shell, "between")
        async with store(shell, config.kvbm.pool, "k2"):
            await attached(shell, "k2")
            await saved(shell, 2 * BLOCKS)
            after, _ = await answer(shell, "after")
        assert said == between == after
