"""EngineProcess: the shell's side of the engine process, which it starts, talks to, and ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from services.worker.config import EngineConfig, WorkerConfig
from services.worker.contracts.messages import EngineOrder, EngineReport, Prefetch, Shutdown, Submit, TakeOver
from services.worker.engine.channel import ChannelClosed, ShellEnd
from services.worker.engine.process_group import kill_group
from shared.config import environment
from shared.errors import ModelError, ProtocolError
from shared.installation import COMMAND, TREE
from shared.private_directory import NoDirectory, private_directory
from shared.processors import usable_processors
from shared.runtime import logs

PROGRAMS = {
    "native": "services.worker.engine_main",
    "simulated": "services.worker.engine_main",
    "echo": "services.worker.engine_main",
    "vllm": "services.worker.vllm.main",
    "diffusers": "services.worker.diffusers.main",
}
"""Engine → its program's module."""
_GPU_DRIVER = Path("/dev/nvidiactl")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
PACKAGES = {
    "vllm": ("vllm", "torch", "msgspec", "zmq"),
    "diffusers": ("diffusers", "torch", "transformers", "msgspec", "xxhash"),
}
"""Engine with an environment of its own → what its program imports, or vLLM before it can say what it lacks."""
LEAST_PYTHON = (3, 11)
LIMIT_S = 60.0
"""Seconds within which the check must end; on a slow disk Python's own start may take some."""
_QUESTION = """
import importlib.util, json, sys
lacking = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps([list(sys.version_info[:2]), lacking]))
"""


@dataclass(frozen=True)
class EngineProcess:
    """One engine process and the channel to it."""

    process: subprocess.Popen[bytes]
    channel: ShellEnd
    held: ExitStack = field(default_factory=ExitStack)
    """What goes when it has ended."""

    @staticmethod
    async def start(
        config: WorkerConfig, model_name: str, instance: str, *, module: str = "", stands_by: bool = False
    ) -> EngineProcess:
        """Return when the process runs; it reports Loading and Ready by itself, or StandingBy first. `instance` is the
        worker's id, `module` the engine's program if it is not that of `config.engine`. It logs from the level on that
        this process has now. Raise ModelError if vLLM's Python is not one that can run it, or its sockets have no
        place."""
        python = sys.executable
        if config.engine in PACKAGES:
            setting = config.vllm_python if config.engine == "vllm" else config.diffusers.python
            python = await asyncio.to_thread(check_python, config.engine, setting)
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as held:
            observe = replace(config.observe, log_level=logs.level())
            engine_config = EngineConfig.of(
                replace(config, observe=observe), model_name, instance, parent_pid=os.getpid(), stands_by=stands_by
            )
            command = [python, "-m", module or PROGRAMS[config.engine], msgspec.json.encode(engine_config).decode()]
            sockets = held.enter_context(socket_directory()) if config.engine == "vllm" else ""
            environ = engine_environment(config, instance, sockets)
            process = _spawn([*command, str(theirs.fileno())], theirs.fileno(), environ)
            kept = held.pop_all()
        return EngineProcess(process, await ShellEnd.open(ours), kept)

    @property
    def pid(self) -> int:
        return self.process.pid

    def submit(self, command: Submit | Prefetch) -> bool:
        """Send an attempt, or advice. Return False if the engine does not read, and nothing was sent."""
        if self.channel.full:
            return False
        self.channel.send(command)
        return True

    def send(self, command: EngineOrder | TakeOver) -> None:
        """Send a command. There is at most one for each submitted attempt and each request of either side, so that they
        need no bound."""
        self.channel.send(command)

    async def receive(self) -> EngineReport:
        """Return the next report. Raise ChannelClosed."""
        return await self.channel.receive()

    def kill(self) -> None:
        """End the process and those that it started at once; `receive` will raise ChannelClosed."""
        kill_group(self.process.pid)

    async def end(self, limit_s: float, last: Callable[[EngineReport], None] = lambda _report: None) -> int:
        """Send Shutdown, and after `limit_s` SIGKILL; return the exit status. `last` gets the reports that come
        meanwhile; without it they are dropped."""
        self.channel.send(Shutdown())
        try:
            async with asyncio.timeout(limit_s):
                with suppress(ChannelClosed):
                    while True:
                        with suppress(ProtocolError):
                            last(await self.channel.receive())
                await asyncio.to_thread(self.process.wait)
        except TimeoutError:
            pass
        self.kill()  # also where the process has ended: those that it started may live
        self.channel.close()
        status = await asyncio.to_thread(self.process.wait)
        self.held.close()
        return status


@contextmanager
def socket_directory() -> Iterator[str]:
    """Yield a directory for the sockets between the processes of one vLLM engine, which leave them behind. Raise
    ModelError."""
    try:
        with private_directory(Path(tempfile.gettempdir()), prefix="headrace-vllm-") as directory:
            yield str(directory)
    except NoDirectory as wrong:
        raise ModelError(f"no directory for vLLM's sockets (TMPDIR): {wrong.why}: {wrong.place}") from None


def _spawn(command: list[str], channel: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the process as the head of a process group of its own, which `kill` ends as a whole.

    It is started by vfork and exec, which runs no fork handlers: gRPC's do not survive a fork while its threads run,
    nor does CUDA. Called from the main thread, since the kernel's death signal follows the thread that spawned.
    """
    return subprocess.Popen(command, pass_fds=(channel,), env=environ, stdin=subprocess.DEVNULL, process_group=0)


def engine_environment(config: WorkerConfig, instance: str = "", sockets: str = "") -> dict[str, str]:
    """Return the engine's environment: the shell's without its settings and secrets. Added are the number of arithmetic
    threads, and where CuPy keeps compiled kernels, unless that is set: its own choice, the home directory, cannot be
    written to in a container. `instance` is the worker's id, for vLLM's spans; `sockets` is where vLLM's processes
    make theirs."""
    kept = {name: value for name, value in environment().items() if not name.startswith("HEADRACE_")}
    kernels = {"CUPY_CACHE_DIR": str(Path(config.cache, "cupy").absolute())} if config.device == "cuda" else {}
    counts = dict.fromkeys(_THREAD_VARIABLES, str(count)) if (count := _threads(config)) else {}
    if config.engine == "diffusers":
        chosen = {"CUDA_VISIBLE_DEVICES": config.diffusers.gpu} if config.diffusers.gpu else {}
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        return offline | kept | counts | chosen | {"PYTHONPATH": str(TREE)}
    if config.engine != "vllm":
        return kernels | kept | counts
    kept.pop("PROMETHEUS_MULTIPROC_DIR", None)  # other workers, and engines that have ended, would be counted with it
    chosen = {"CUDA_VISIBLE_DEVICES": config.vllm_gpus} if config.vllm_gpus else {}
    ours = {"PYTHONPATH": str(TREE)}  # vLLM's Python does not know the packages services and shared
    fixed = counts | chosen | _tracing(config, instance) | ours
    inner = {"VLLM_RPC_BASE_PATH": sockets} if sockets else {}
    return _vllm_defaults(config) | inner | kept | fixed


def _threads(config: WorkerConfig) -> int:
    """Return the number of arithmetic threads, which BLAS and torch read when they are loaded; 0 leaves it to vLLM.

    The native engine on a GPU leaves little to the host's threads, and gets as many as on a CPU, as is NumPy's default.
    vLLM on a GPU loads weights with a share of the cores for each rank and serves with one thread a rank, but only if
    OMP_NUM_THREADS is not set: further threads spin next to the scheduler.
    """
    threads = config.threads or usable_processors()
    if config.engine != "vllm":
        return max(1, threads // config.tensor_parallel)  # for each rank
    if config.vllm_gpus or _GPU_DRIVER.exists():
        return config.threads
    return max(1, threads - 1)  # its core needs a processor too: on two cores two threads made it 20 times as slow


def _vllm_defaults(config: WorkerConfig) -> dict[str, str]:
    """Return variables of vLLM that are set unless the worker's environment has them."""
    return {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may deadlock
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all workers of a machine take the same processors
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, ceil(config.capacity_bytes / (1 << 30)))),
        "HF_HUB_OFFLINE": "1",
    }


def _tracing(config: WorkerConfig, instance: str) -> dict[str, str]:
    """Return OpenTelemetry's variables with which vLLM sends spans as the worker does, but for the endpoint, which is
    an argument of vLLM. Requests that are not traced, and vLLM's own start, get none: no span is its parent."""
    if not config.trace.endpoint:
        return {}
    attributes = {"service.namespace": config.namespace, "service.instance.id": instance}
    token = {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%20{quote(config.trace.token, safe='')}"}
    return {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": str(config.trace.timeout_s),
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_SERVICE_NAME": "headrace-vllm",
        "OTEL_RESOURCE_ATTRIBUTES": ",".join(f"{name}={quote(value)}" for name, value in attributes.items()),
        **(token if config.trace.token else {}),
    }


def check_python(engine: str, setting: str) -> str:
    """Return the absolute path of the Python of an engine's environment, which is checked before an engine is started
    with it, since a program that lacks its packages could only die without a report. Blocks for some 50 ms. Raise
    ModelError, naming the setting, where it is not there, is no Python, is too old, or lacks a package."""
    python = str(Path(setting).absolute())
    where = f"worker.{'vllm_python' if engine == 'vllm' else f'{engine}.python'} is {python}"
    remedy = f"{COMMAND} install-{engine} makes an environment"
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise ModelError(f"{where}, which is not there: {remedy}")
    try:
        command = [python, "-c", _QUESTION, *PACKAGES[engine]]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=True)
        version, lacking = json.loads(ran.stdout)
        (major, minor), lacking = map(int, version), list(map(str, lacking))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        raise ModelError(f"{where}, which does not run as a Python: {remedy}") from None
    if (major, minor) < LEAST_PYTHON:
        raise ModelError(
            f"{where}, which is Python {major}.{minor}; at least {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} works"
        )
    if lacking:
        raise ModelError(f"{where}, which lacks {', '.join(lacking)}: {remedy}")
    return python
