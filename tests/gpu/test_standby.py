"""An engine that stands by next to one on the same device: it takes over when that one is killed, with its KV's memory.

The same test runs with a CPU if there is no GPU.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.memory.ledger import LedgerLimits
from tests.integration.kinds import CPU, GPU, GPU_16_BITS, Kind, params
from tests.tiny_model import write_tiny_model
from tests.worker.memory.test_service import serving
from tests.worker.shell import NAMESPACE, Shell, endless, running_worker
from tests.worker.test_standby import computed, engine_pid, standing_by

pytestmark = pytest.mark.timeout(900)

SHAPE: dict[str, Any] = {
    **{"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 512, "layers": 4, "tied": False},
    **{"context_length": 16_384},
}
KINDS = params((CPU[0], GPU[0], GPU_16_BITS[1]), cpu_stands_in=True)


def worker_config(tmp_path: Path, kind: Kind, **more: Any) -> WorkerConfig:
    """Return a worker whose KV is larger than what a standby has for its first tokens."""
    own: dict[str, Any] = {
        **{"namespace": NAMESPACE, "model": str(write_tiny_model(tmp_path / "model", **SHAPE))},
        **{"cache": str(tmp_path / "cache"), "capacity_blocks": 1024, "threads": 1, "drain_s": 0.2, "standby": True},
    }
    if kind.device == "cuda":
        own |= {"device": "cuda", "cuda": {"dtype": kind.dtype, "graph_upper_bound": 8}}
    return msgspec.convert(own | more, WorkerConfig)


def streams(shell: Shell, name: str) -> bool:
    return len(shell.peer.tokens(name)) > 1


async def taken_over_twice(config: WorkerConfig) -> None:
    """Kill the engine during a stream, twice."""
    async with running_worker(config) as shell:
        first = await computed(shell, "before")
        for name in ("r", "s"):
            waiting = await standing_by(shell)
            await shell.peer.generate(endless(name))
            await shell.peer.until(partial(streams, shell, name))
            os.kill(engine_pid(shell), signal.SIGKILL)
            assert await shell.peer.ended(name) == "error"
            assert await computed(shell, f"after {name}") == first
            assert engine_pid(shell) == waiting
        assert shell.worker.engine.take_overs == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_standby_takes_over_twice_and_computes_the_same(tmp_path: Path, kind: Kind) -> None:
    await taken_over_twice(worker_config(tmp_path, kind))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_standby_maps_the_weights_of_the_engine_that_it_follows(tmp_path: Path, kind: Kind) -> None:
    memory = {"memory": str(tmp_path / "memory")}
    with serving(tmp_path / "memory", LedgerLimits(size_bytes=1 << 30)):
        await taken_over_twice(worker_config(tmp_path, kind, weights=memory))
