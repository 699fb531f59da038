"""EngineProcess: the shell's side of the engine process, which it starts, talks to, and ends."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.worker.config import EngineConfig, WorkerConfig
from services.worker.engine.channel import ShellEnd
from services.worker.messages import EngineOrder, EngineReport, Shutdown, Submit
from shared.config import environment

ENGINE_MODULE = "services.worker.engine_main"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class EngineProcess:
    """One engine process and the channel to it."""

    process: subprocess.Popen[bytes]
    channel: ShellEnd

    @staticmethod
    async def start(
        config: WorkerConfig, model_name: str, instance: str, *, module: str = ENGINE_MODULE
    ) -> EngineProcess:
        """Return when the process runs; it reports Loading and Ready by itself. `instance` is the worker's id, `module`
        the engine's program."""
        ours, theirs = socket.socketpair()
        with theirs:
            engine_config = EngineConfig.of(config, model_name, instance, parent_pid=os.getpid())
            process = _spawn(module, engine_config, theirs.fileno(), engine_environment(config))
        return EngineProcess(process, await ShellEnd.open(ours))

    @property
    def pid(self) -> int:
        return self.process.pid

    def submit(self, command: Submit) -> bool:
        """Send an attempt. Return False where the engine does not read, and nothing was sent."""
        if self.channel.full:
            return False
        self.channel.send(command)
        return True

    def send(self, command: EngineOrder) -> None:
        """Send a command. There is at most one for each submitted attempt and each request of either side, so that they
        need no bound."""
        self.channel.send(command)

    async def receive(self) -> EngineReport:
        """Return the next report. Raise PeerGone."""
        return await self.channel.receive()

    def kill(self) -> None:
        """End the process at once; `receive` will raise PeerGone."""
        self.process.kill()

    async def end(self, limit_s: float) -> int:
        """Send Shutdown, and after `limit_s` SIGKILL; return the exit status. Reports that come meanwhile are
        dropped."""
        self.channel.send(Shutdown())
        try:
            async with asyncio.timeout(limit_s):
                await self.channel.ended()
                await asyncio.to_thread(self.process.wait)
        except TimeoutError:
            self.process.kill()
        self.channel.close()
        return await asyncio.to_thread(self.process.wait)


def _spawn(module: str, config: EngineConfig, channel: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the process by vfork and exec, which runs no fork handlers: gRPC's do not survive a fork while its threads
    run, nor does CUDA.

    Called from the main thread, since the kernel's death signal follows the thread that spawned.
    """
    command = [sys.executable, "-m", module, msgspec.json.encode(config).decode(), str(channel)]
    return subprocess.Popen(command, pass_fds=(channel,), env=environ, stdin=subprocess.DEVNULL)


def engine_environment(config: WorkerConfig) -> dict[str, str]:
    """Return the engine's environment: the shell's without its settings and secrets. Added are the number of arithmetic
    threads, which BLAS reads when it is loaded, and where CuPy keeps compiled kernels, unless that is set: its own
    choice, the home directory, cannot be written to in a container."""
    count = str(config.threads or os.cpu_count() or 1)
    kept = {name: value for name, value in environment().items() if not name.startswith("HEADRACE_")}
    kernels = {"CUPY_CACHE_DIR": str(Path(config.cache, "cupy").absolute())} if config.device == "cuda" else {}
    return kernels | kept | dict.fromkeys(_THREAD_VARIABLES, count)
