"""The shell's side of the engine process: start it, talk to it, end it."""

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
from services.worker.messages import (
    CancelAttempt,
    EngineReport,
    KvbmDown,
    KvbmReply,
    KvbmUp,
    Shutdown,
    Submit,
    TakeEngineSnapshot,
)
from shared.config import environment

ENGINE_MODULE = "services.worker.engine_main"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class EngineProcess:
    """One engine process."""

    process: subprocess.Popen[bytes]
    channel: ShellEnd

    @staticmethod
    async def start(
        config: WorkerConfig, model_name: str, instance: str, *, module: str = ENGINE_MODULE
    ) -> EngineProcess:
        """Returns when the process runs, which tells Loading and Ready by itself; `instance` is the worker's id,
        `module` the engine's program."""
        ours, theirs = socket.socketpair()
        with theirs:
            engine_config = EngineConfig.of(config, model_name, instance, parent_pid=os.getpid())
            process = _spawn(module, engine_config, theirs.fileno(), engine_environment(config))
        return EngineProcess(process, await ShellEnd.open(ours))

    @property
    def pid(self) -> int:
        return self.process.pid

    def submit(self, command: Submit) -> bool:
        """False: the engine does not read, and nothing was sent."""
        if self.channel.full:
            return False
        self.channel.send(command)
        return True

    def send(self, command: CancelAttempt | TakeEngineSnapshot | KvbmUp | KvbmDown | KvbmReply) -> None:
        """At most one a submitted attempt or a question of either side, so no bound of its own."""
        self.channel.send(command)

    async def receive(self) -> EngineReport:
        """The next report. Raises PeerGone."""
        return await self.channel.receive()

    def kill(self) -> None:
        """It ends at once; `receive` will say so."""
        self.process.kill()

    async def end(self, limit_s: float) -> int:
        """Shutdown, and after `limit_s` SIGKILL; returns the exit status. What it reports meanwhile is dropped."""
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
    """By vfork and exec, which runs no fork handlers: gRPC's do not survive a fork beside its threads, nor does CUDA.

    From the main thread, since the kernel's death signal follows the thread that spawned.
    """
    command = [
        sys.executable,
        "-m",
        module,
        msgspec.json.encode(config).decode(),
        str(channel),
    ]
    return subprocess.Popen(command, pass_fds=(channel,), env=environ, stdin=subprocess.DEVNULL)


def engine_environment(config: WorkerConfig) -> dict[str, str]:
    """Ours, with the number of arithmetic threads, which BLAS reads when it is loaded, and where CuPy keeps compiled
    kernels, unless that is said: in a container its own choice, the home directory, cannot be written to. Secrets stay
    here."""
    count = str(config.threads or os.cpu_count() or 1)
    kept = {name: value for name, value in environment().items() if not name.startswith("HEADRACE_")}
    kernels = {"CUPY_CACHE_DIR": str(Path(config.cache, "cupy").absolute())} if config.device == "cuda" else {}
    return kernels | kept | dict.fromkeys(_THREAD_VARIABLES, count)
