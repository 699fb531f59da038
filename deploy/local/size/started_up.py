"""Starts an `up` for a measurement, and stops it again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from msgspec import Struct

from deploy.local import install_vllm
from deploy.local.stack import gpus, servers
from deploy.local.stack.announce import LAST_LINE
from deploy.local.stack.stack import Gpus
from deploy.local.state import CACHE_VARIABLE, StateDirectory
from deploy.local.terminal import Terminal
from deploy.local.usage import GPU_MEMORY_SHARE
from shared.config import environment
from shared.errors import ConfigError, Unavailable
from shared.installation import TREE
from shared.processors import usable_processors

START_LIMIT_S = 1800.0
"""The most seconds of a start; the first one may fetch a model."""
STOP_LIMIT_S = 120.0
STATUS_LIMIT_S = 60.0
CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
ONE_WORKER = ("--workers", "1", "--frontends", "1", "--routers", "1", "--kvbm-bytes", "0")
LINES_KEPT = 200
"""The most lines of an `up` that are kept."""
LOST_LIMIT = 3
"""How often a worker of an `up` may be lost, with its engine or alone, before it serves: then it is given up."""
_LOST = re.compile(r"(\S+?)(: the engine is lost| ended) \(")
_PROGRESS = re.compile(r"(.*): (\d{1,3}) %")
_OURS = (*ONE_WORKER[::2], "--port", "--state", "--prefill", "--decode", "--single")


@contextmanager
def started_ups(words: Sequence[str], workers: int, terminal: Terminal) -> Iterator[list[tuple[str, Path]]]:
    """Yield the URLs of `workers` `up`s with these flags and one worker each, and their state directories. Each has its
    share of the machine. Raise ConfigError for flags that are not the caller's to choose and for too few GPUs,
    Unavailable if one does not start."""
    ours = next((word for word in words if word.split("=")[0] in _OURS), None)
    if ours is not None:
        raise ConfigError(f"{ours}: `profile` starts one worker in each `up`, and chooses this flag itself")
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_up((*ONE_WORKER, *threads, *words), terminal, "this profile", variables))
            for threads, variables in _shares(words, workers)
        ]


def _shares(words: Sequence[str], workers: int) -> list[tuple[Sequence[str], Mapping[str, str]]]:
    """Return the flags and the variables that give each of several `up`s what a worker of one `up` has."""
    if workers == 1:
        return [((), {})]
    said = " ".join(words).replace("=", " ").split()
    vllm_gpus = "vllm" in said and install_vllm.device_of() == "cuda"
    threads = () if vllm_gpus else ("--set", f"worker.threads={max(1, usable_processors() // workers)}")
    if not vllm_gpus and "cuda" not in said:
        return [(threads, {})] * workers
    visible = gpus.visible_gpus(gpus.ask_driver("--workers", 0), environment().get(CUDA_VARIABLE))
    if vllm_gpus or len(visible) >= workers or "--tensor-parallel" in said:
        return [(threads, {CUDA_VARIABLE: names}) for names in gpu_shares(visible, workers)]
    return [
        ((*threads, "--gpu-memory-share", f"{GPU_MEMORY_SHARE / sharing:.4f}"), {CUDA_VARIABLE: name})
        for name, sharing in gpus_in_turn(visible, workers)
    ]


def gpu_shares(visible: Sequence[str], workers: int) -> list[str]:
    """Divide GPUs among workers, each of which gets as many. Raise ConfigError if there are too few. *Pure.*"""
    each = len(visible) // workers
    if not each:
        raise ConfigError(f"--workers {workers} needs as many GPUs; CUDA shows {len(visible)}")
    return [",".join(visible[number * each : (number + 1) * each]) for number in range(workers)]


def gpus_in_turn(visible: Sequence[str], workers: int) -> list[tuple[str, int]]:
    """Return the GPU of each worker, and how many workers share that one, as `up` shares them out. *Pure.*"""
    places = [Gpus(len(visible), 1.0).place_of(worker, workers) for worker in range(workers)]
    return [(visible[gpu], sharing) for gpu, sharing in places]


@contextmanager
def running_up(
    words: Sequence[str], terminal: Terminal, purpose: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Path]]:
    """Yield the URL of an `up` with these flags, and its state directory. `purpose` is what it is for, in messages;
    `variables` are added to its environment. Raise Unavailable if it does not start."""
    with tempfile.TemporaryDirectory(prefix="headrace-up-") as home:
        state, [port] = StateDirectory(Path(home)), servers.free_ports(1)
        flags, environ = ("--port", str(port), "--state", home, *words), {**_variables(), **(variables or {})}
        pipe, words_of_up = subprocess.PIPE, [*servers.tether("--terminate"), *command("up", *flags)]
        process = subprocess.Popen(words_of_up, env=environ, stdout=pipe, stderr=pipe, text=True, errors="replace")
        assert process.stderr is not None
        output, failed = UpOutput(process.stderr, terminal, process.terminate), False
        try:
            url = _ready_url(process, purpose)
            terminal.notice(f"started for {purpose}: {url}")
            yield url, state.home
        except Unavailable:
            failed = True
            raise
        finally:
            output.stop()
            _stop(process)
            output.close(failed=failed)


class UpOutput:
    """What an `up` says on stderr. Its progress is shown, what it has lost, and what happens while it serves. The rest
    of what it says at its start is kept, and shown if it fails. One that loses its engine again and again is given up.

    starting ──the last line of how to ask──▶ serving ──stop──▶ stopping
    """

    def __init__(self, stream: IO[str], terminal: Terminal, give_up: Callable[[], None]) -> None:
        self._stream, self._terminal, self._give_up = stream, terminal, give_up
        self._state, self._lost = "starting", Counter[str]()
        self._kept: deque[str] = deque(maxlen=LINES_KEPT)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """Show nothing more: it is stopped. What it said before it served is still kept."""
        if self._state == "serving":
            self._state = "stopping"

    def close(self, *, failed: bool) -> None:
        """Wait for its end. Show what was kept if it has failed and did not serve."""
        self._reader.join(STOP_LIMIT_S)
        if failed and self._state == "starting":
            self._terminal.clear()
            for line in self._kept:
                self._terminal.notice(line)

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                text = line.rstrip()
                if self._state == "serving":
                    self._terminal.notice(text)
                elif self._state == "starting" and (found := _PROGRESS.fullmatch(text)):
                    self._terminal.progress(found[1], int(found[2]) / 100)
                elif self._state == "starting" and (found := _LOST.match(text)):
                    self._terminal.notice(text)
                    self._lost[found[1]] += 1
                    if self._lost[found[1]] == LOST_LIMIT:
                        self._give_up()
                elif self._state == "starting":
                    self._kept.append(text)
                    self._state = "serving" if text == LAST_LINE else self._state


def command(*words: str) -> list[str]:
    """Return the command line of another `headrace` of this installation."""
    return [sys.executable, "-P", "-m", "deploy.local.cli", *words]


class UpSizes(Struct, frozen=True):
    """What the `up` of a state directory says of a model. Zeros if it does not say it."""

    workers: int = 0
    block_size: int = 0
    """The tokens of a block."""
    kv_tokens: int = 0
    """The tokens of KV for which one worker has room."""
    context_tokens: int = 0
    """The tokens of the longest context."""


def sizes_of(state: Path, model: str) -> UpSizes:
    """Return what the `up` that runs with a state directory says of a model."""
    words = command("status", "--json", "--state", str(state))
    try:
        shown = subprocess.run(words, env=_variables(), capture_output=True, timeout=STATUS_LIMIT_S, check=True)
        found = next(each for each in json.loads(shown.stdout)["models"] if each["model"] == model)
        workers, block_size = len(found["instances"]), int(found["block_size"])
        kv_tokens = block_size * int(found["total_blocks"]) // max(1, workers)
        return UpSizes(workers, block_size, kv_tokens, int(found["context_length"]))
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError, StopIteration):
        return UpSizes()


def _variables() -> dict[str, str]:
    """Return the environment without settings of services, which `up` would refuse."""
    variables = environment()
    kept = {name: value for name, value in variables.items() if not name.startswith("HEADRACE_")}
    if CACHE_VARIABLE in variables:
        kept[CACHE_VARIABLE] = variables[CACHE_VARIABLE]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (str(TREE), variables.get("PYTHONPATH"))))}


def _ready_url(process: subprocess.Popen[str], purpose: str) -> str:
    """Wait until it says ready, and return its URL."""
    assert process.stdout is not None
    timer = threading.Timer(START_LIMIT_S, process.terminate)
    timer.start()
    try:
        for line in process.stdout:
            word, _, url = line.strip().partition(" ")
            if word == "ready":  # and nothing after it: `up` says the rest on stderr
                return url
    finally:
        timer.cancel()
    raise Unavailable(f"the `up` for {purpose} did not start, status {process.wait()}: the lines above say why")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()  # no SIGINT: a shell's background jobs ignore it, and so does all that they start
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()
