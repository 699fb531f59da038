"""Serves in rounds: between two of them the worker has no connection, and may be frozen and restored as an image.

    serve ──asleep, with checkpoint.directory──▶ PausedWorker ──restored──▶ serve, as another instance
      │                                              └── checkpointed, or a signal ──▶ ended
      └── a signal ──▶ ended

What stays is the process, and an engine that stands by. So an image has weights, modules and nothing that another
process remembers: no connection, lease, subscription or instance id. docs/checkpoint.md says what a tool does,
docs/decisions/0086 why it is so.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from services.worker.config import WorkerConfig
from services.worker.engine.standby import Standby
from services.worker.engine_start import start_standby
from services.worker.model.card import served_name
from services.worker.operations.checkpoint import POLL_S, READY, CheckpointFiles, make_directory
from services.worker.service import Worker
from shared.runtime.lifecycle import settle_memory
from shared.runtime.runtime import Runtime

STANDBY_LIMIT_S = 660.0
"""Seconds until an engine stands by in a worker that sleeps. Afterwards the worker serves again."""

_log = logging.getLogger(__name__)


def make_standby(config: WorkerConfig, instance: str) -> Standby | None:
    """Return what keeps an engine standing by, if the settings ask for it; the caller ends it."""
    if not (config.standby or config.checkpoint.directory):
        return None
    return Standby(partial(start_standby, config, served_name(config), instance))


async def serve(runtime: Runtime, config: WorkerConfig) -> PausedWorker | None:
    """Serve until `runtime.stopping`, then drain; or until the worker sleeps without a connection. Raise ModelError if
    the model cannot be served, and ConfigError if there is no directory for checkpoints."""
    if config.checkpoint.directory:
        make_directory(config.checkpoint.directory)
    return await _serve_round(runtime, config, make_standby(config, runtime.instance))


async def _serve_round(runtime: Runtime, config: WorkerConfig, standby: Standby | None) -> PausedWorker | None:
    worker = Worker(runtime, config, standby=standby)
    settle_memory()
    paused = False
    try:
        paused = await worker.run()
    finally:
        if standby is not None and not paused:
            await standby.end()
    return PausedWorker(config, runtime.instance, standby) if paused and standby is not None else None


class PausedWorker:
    """A worker that sleeps without a connection."""

    def __init__(self, config: WorkerConfig, instance: str, standby: Standby) -> None:
        self._standby = standby
        self._files = CheckpointFiles(Path(config.checkpoint.directory), instance)

    async def wait(self, stopping: asyncio.Event) -> bool:
        """Have an engine stand by, say that this process may be frozen, and wait for the tool's answer or a signal.
        Return whether the worker serves again: also if it cannot be frozen."""
        again = False
        try:
            again = await self._wait(stopping)
        finally:
            if not again:
                await self._standby.end()
        return again

    async def _wait(self, stopping: asyncio.Event) -> bool:
        self._standby.keep(0.0)
        until_s = asyncio.get_running_loop().time() + STANDBY_LIMIT_S
        while self._standby.ready is None and not stopping.is_set():
            if asyncio.get_running_loop().time() >= until_s:
                _log.error("no engine stands by after %g s: the worker cannot be frozen, and serves", STANDBY_LIMIT_S)
                return True
            await asyncio.sleep(POLL_S)
        try:
            self._files.open()
        except OSError as wrong:
            _log.error("checkpoint.directory: %s: the worker cannot be frozen, and serves", wrong)
            return True
        _log.info("asleep without a connection, as %s says", self._files.directory / READY)
        try:
            verdict = await self._files.wait(stopping.is_set)
        finally:
            self._files.close()
        _log.info("%s", {"wait": "ending", "end": "checkpointed: ending", "go on": "restored: serving"}[verdict])
        return verdict == "go on"

    async def serve(self, runtime: Runtime, config: WorkerConfig) -> PausedWorker | None:
        """Serve the next round, with the engine that stood by."""
        return await _serve_round(runtime, config, self._standby)
