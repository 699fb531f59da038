"""Faults of a worker with a GPU: killed during copies, a pool too small or not pinned, no memory left, a failed device.

No request hangs, no byte is wrong, and the next worker serves. Some run with a CPU if there is no GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.breaking_engine import FATAL
from tests.integration.fleet import fleet
from tests.integration.kinds import CPU, GPU, Kind, params
from tests.integration.machine import (
    WORKERS,
    Machine,
    Wire,
    connected,
    eventually,
    full_blocks,
    prompt,
    refusal,
)
from tests.tiny_model import write_tiny_model

SHAPE: dict[str, Any] = {
    **{"context_length": 8192, "hidden": 128, "heads": 8, "kv_heads": 8, "head_dim": 128, "intermediate": 128},
    **{"layers": 8, "tied": False},
}
"""A model with little to compute and much to copy: a block has 1 MiB."""
BLOCK_BYTES = 1 << 20
LENGTHS = {"cpu": 160, "cuda": 2000}
"""The length of prompts, in tokens."""
POOLS = {"cpu": 100, "cuda": 1500}
"""The size of the pool, in blocks."""
PROMPTS = 6


@contextmanager
def machine_of(
    folder: Path, nats_url: str, kind: Kind, pool_bytes: int, *flags: str, pool: Path | None = None
) -> Iterator[Machine]:
    """Make a machine, on which no worker runs yet."""
    model = write_tiny_model(folder / "tiny", **SHAPE)
    with kind.pool(folder) as usual, fleet(folder, nats_url, *Machine.where(folder)) as processes:
        capacity = ("--capacity-blocks", str(POOLS[kind.device]))
        yield Machine(processes, folder, model, pool_bytes, *kind.flags, *capacity, *flags, pool=pool or usual)


@asynccontextmanager
async def all_of(machine: Machine, nats_url: str) -> AsyncIterator[Wire]:
    """Start a machine's kvbm and workers, whose loads are compared with the pool."""
    machine.start_kvbm()
    for name in WORKERS:
        machine.start_worker(name, *(() if name == "alone" else ("--kvbm-verify", "true")))
    machine.fleet.wait_ready()
    async with connected(machine, nats_url) as wire:
        await wire.attached()
        yield wire
        await wire.nothing_held()
        for name in ("first", "second"):
            assert machine.process(name).metric("headrace_kvbm_differing_blocks_total") == 0


@pytest.mark.parametrize("kind", params((CPU[0], GPU[0]), cpu_stands_in=True))
async def test_a_worker_killed_among_copies_leaves_right_bytes_and_no_slot_is_lost(
    tmp_path: Path, nats_url: str, kind: Kind
) -> None:
    length = LENGTHS[kind.device]
    slots = POOLS[kind.device]
    with machine_of(tmp_path, nats_url, kind, slots * BLOCK_BYTES) as machine:
        async with all_of(machine, nats_url) as wire:
            asked = [prompt(length, number) for number in range(PROMPTS)]
            for each in asked:
                await wire.compute("first", each)
            machine.process("first").kill()
            machine.start_worker("first", "--kvbm-verify", "true")  # its device has no block
            await wire.attached()
            for tickets in ("fetch", "store"):
                new = [prompt(length, (tickets, number)) for number in range(PROMPTS)]
                for load, save in zip(asked, new, strict=True):
                    await wire.begin("first", load)
                    await wire.begin("first", save)
                copying = await _copying(wire, tickets)
                machine.process("first").kill()
                print(f"killed beside these tickets: {copying}")
                machine.start_worker("first", "--kvbm-verify", "true")
                await wire.attached()
                await wire.nothing_held()
                for each in (*asked, *new):
                    assert (await wire.ask("second", each)).tokens == (await wire.ask("alone", each)).tokens
            assert machine.process("second").metric("headrace_kvbm_copied_blocks_total", outcome="loaded") > 0
            await wire.nothing_held()
            await _every_slot_is_free_or_ready(wire)


async def _copying(wire: Wire, tickets: str) -> dict[str, int]:
    """Wait until kvbm has granted slots to a worker; return its tickets."""

    async def seen() -> dict[str, int] | None:
        state = await wire.state()
        return state.tickets if state is not None and state.tickets[tickets] else None

    return await eventually(seen, "blocks are copied", pause_s=0)


async def _every_slot_is_free_or_ready(wire: Wire) -> None:
    """Wait until kvbm shows that every slot is free or ready."""
    kvbm = wire.machine.process("kvbm")
    layout = await wire.until_state(lambda _: True, "it answers")

    async def seen() -> bool:
        states = ("free", "ready", "writing", "loading", "quarantined", "held")
        free, ready, *others = [kvbm.metric("headrace_kvbm_slots", state=state) for state in states]
        return free + ready == layout.host.capacity_blocks and not any(others)

    await eventually(seen, "every slot of the pool is free or has a block")


@pytest.mark.parametrize("kind", params((CPU[0], GPU[0]), cpu_stands_in=True))
async def test_with_a_pool_too_small_for_a_block_workers_serve_and_say_so(
    tmp_path: Path, nats_url: str, kind: Kind
) -> None:
    with machine_of(tmp_path, nats_url, kind, BLOCK_BYTES // 2) as machine:
        machine.start_kvbm()
        for name in ("first", "alone"):
            machine.start_worker(name)
        machine.fleet.wait_ready()
        async with connected(machine, nats_url) as wire:
            asked = prompt(100, "small")
            assert await wire.ask("first", asked) == await wire.ask("alone", asked)

            async def told() -> bool:
                return "no blocks are exchanged" in machine.process("first").log.read_text()

            await eventually(told, "it says why")


@pytest.mark.parametrize("kind", params((CPU[0], GPU[0]), cpu_stands_in=True))
async def test_a_pool_on_a_disk_that_cannot_be_pinned_serves_the_right_bytes(
    tmp_path: Path, nats_url: str, kind: Kind
) -> None:
    if _file_system(tmp_path) == "tmpfs":
        pytest.skip(f"{tmp_path} is memory, too")
    with machine_of(tmp_path, nats_url, kind, 100 * BLOCK_BYTES, pool=tmp_path / "on-disk") as machine:
        async with all_of(machine, nats_url) as wire:
            asked = prompt(320, "on disk")
            answer = await wire.compute("first", asked)
            loaded = await wire.ask("second", asked)
            assert (loaded.tokens, loaded.host) == (answer.tokens, 16 * full_blocks(asked))
            if kind.device == "cuda":
                second = machine.process("second")

                async def shown() -> bool:  # with the next load report
                    return second.metric("headrace_kvbm_path_blocks_total", path="pageable") > 0

                await eventually(shown, "its blocks took the slow way")
                assert "cannot be pinned" in second.log.read_text()


def _file_system(place: Path) -> str:
    command = ["stat", "--file-system", "--format=%T", str(place)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("kind", params((CPU[0], GPU[0]), cpu_stands_in=True))
async def test_an_engine_whose_device_fails_is_started_again_and_others_do_not_notice(
    tmp_path: Path, nats_url: str, kind: Kind
) -> None:
    with machine_of(tmp_path, nats_url, kind, 100 * BLOCK_BYTES) as machine:
        machine.start_kvbm()
        machine.start_worker("alone")
        machine.start_worker("breaking", "--kvbm-verify", "true", module="tests.gpu.breaking_worker")
        machine.fleet.wait_ready()
        async with connected(machine, nats_url) as wire:
            await wire.linked("breaking", True)
            asked = prompt(300, "before")
            expected = (await wire.ask("alone", asked, 200)).tokens
            assert (await wire.compute("breaking", asked)).tokens == expected[:8]
            beside = await wire.begin("alone", asked, 200)
            saved = await wire.begin("breaking", prompt(300, "saved"))
            fatal = await wire.begin("breaking", [*FATAL, *asked])
            peer = await wire.peer("breaking")
            assert await peer.ended(fatal) == "error"
            await peer.ended(saved)
            assert (await wire.end("alone", beside)).tokens == expected

            async def lost() -> bool:
                return "starting another" in machine.process("breaking").log.read_text()

            await eventually(lost, "the engine is started again")
            machine.fleet.wait_ready("breaking")
            await wire.linked("breaking", True)
            answer = await wire.ask("breaking", asked, 200)
            assert (answer.tokens, answer.host) == (expected, 16 * full_blocks(asked))
            await _every_slot_is_free_or_ready(wire)
        assert machine.process("breaking").metric("headrace_kvbm_differing_blocks_total") == 0
        assert machine.process("breaking").log.read_text().count("Traceback") < 20


@pytest.mark.parametrize("kind", params((CPU[0], GPU[0]), cpu_stands_in=True))
async def test_an_idle_worker_whose_device_fails_starts_another_engine_before_a_request_comes(
    tmp_path: Path, nats_url: str, kind: Kind
) -> None:
    with machine_of(tmp_path, nats_url, kind, 100 * BLOCK_BYTES) as machine:
        machine.start_kvbm()
        asked = {"FATAL": "1 1"}  # by default
        machine.start_worker("breaking", "--health-idle-s", "0.5", module="tests.gpu.breaking_worker", more=asked)
        machine.fleet.wait_ready()
        worker = machine.process("breaking")

        async def probed() -> bool:
            return worker.metric("headrace_engine_probes_total", outcome="failed") >= 2

        await eventually(probed, "two engines have failed at a probe")
        assert worker.metric("headrace_engine_starts_total") >= 2
        assert worker.metric("headrace_requests_total") == 0
        log = worker.log.read_text()
        assert ("the device has failed" if kind.device == "cpu" else "the GPU failed") in log
        assert "starting another" in log


@pytest.mark.parametrize("kind", params((CPU[0], GPU[0]), cpu_stands_in=True))
async def test_an_idle_worker_on_a_whole_device_is_probed_again_and_again(
    tmp_path: Path, nats_url: str, kind: Kind
) -> None:
    with machine_of(tmp_path, nats_url, kind, 100 * BLOCK_BYTES) as machine:
        machine.start_worker("alone", "--health-idle-s", "0.2")
        machine.fleet.wait_ready()
        worker = machine.process("alone")

        async def probed() -> bool:
            return worker.metric("headrace_engine_probes_total", outcome="ok") >= 5

        await eventually(probed, "an idle engine computes tokens")
        assert worker.metric("headrace_engine_probes_total", outcome="failed") == 0
        assert worker.metric("headrace_computed_tokens_total") == 0
        assert worker.metric("headrace_blocks", state="cached") == worker.metric("headrace_blocks", state="held") == 0


# --- memory of the GPU


@pytest.mark.parametrize("kind", params(GPU[:1]))
def test_a_capacity_that_no_gpu_has_is_refused(tmp_path: Path, nats_url: str, kind: Kind) -> None:
    model = str(write_tiny_model(tmp_path / "tiny", **SHAPE))
    told = refusal("worker", nats_url, tmp_path, "--model", model, *kind.flags, "--capacity-bytes", str(1 << 44))
    print(told)
    assert told.startswith("headrace-worker: ")
    assert "capacity_bytes" in told


@pytest.mark.parametrize("left_bytes", [0, 100 << 20, 700 << 20])
@pytest.mark.parametrize("kind", params(GPU[:1]))
def test_a_gpu_that_others_have_filled_is_refused(tmp_path: Path, nats_url: str, kind: Kind, left_bytes: int) -> None:
    model = str(write_tiny_model(tmp_path / "tiny", **SHAPE))
    with subprocess.Popen(
        [sys.executable, "-c", _FILL, str(left_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "filled\n"
        told = refusal("worker", nats_url, tmp_path, "--model", model, *kind.flags)
        other.stdin.close()
    print(told)
    assert told.startswith("headrace-worker: ")
    assert "GPU" in told


_FILL = """
import sys
from cupy.cuda import runtime
left_bytes = int(sys.argv[1])
piece_bytes = 1 << 40
while piece_bytes > 1 << 20:
    try:
        piece_bytes = min(piece_bytes, runtime.memGetInfo()[0] - left_bytes)
        runtime.malloc(max(piece_bytes, 0))
    except runtime.CUDARuntimeError:
        piece_bytes //= 2
print("filled", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", params(GPU[:1]))
async def test_two_workers_that_both_want_most_of_a_gpu_both_serve_or_one_says_why_not(
    tmp_path: Path, nats_url: str, kind: Kind
) -> None:
    with machine_of(tmp_path, nats_url, kind, 100 * BLOCK_BYTES, "--capacity-blocks", "0") as machine:
        machine.start_worker("alone")
        machine.fleet.wait_ready()
        machine.start_worker("reference")
        machine.fleet.wait_ready()
        async with connected(machine, nats_url) as wire:
            asked = prompt(300, "both")
            assert await wire.ask("alone", asked) == await wire.ask("reference", asked)
