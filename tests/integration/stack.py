"""A whole `headrace up` as a test's own: real servers, real processes, the real default model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import nats

from shared import subjects
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 600.0
"""The first start fetches and converts the model."""
STOP_LIMIT_S = 300.0
ANSWER_LIMIT_S = 300.0
ONE_EACH = ("--frontends", "1", "--routers", "1")
"""On any machine, where a test asks for no more."""

T = TypeVar("T")


def with_models(state: Path) -> Path:
    """A state directory that shares the checkout's models, so that only the first run fetches and converts them."""
    models = ROOT / ".headrace" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (state / "models").symlink_to(models)
    return state


class Up:
    """One running `headrace up`."""

    def __init__(self, process: subprocess.Popen[str], state: Path, output: list[str]) -> None:
        self.process = process
        self.state = state
        self.output = output
        self.ready = threading.Event()
        """Set once it says ready, or has ended."""

    @property
    def record(self) -> dict[str, Any]:
        """What it wrote down for `status` and people."""
        record: dict[str, Any] = json.loads((self.state / "run" / "up.json").read_text())
        return record

    @property
    def url(self) -> str:
        return str(self.record["url"])

    @property
    def nats(self) -> dict[str, Any]:
        """How nats-py connects as the services do."""
        nats = tomllib.loads((self.state / "run" / "fleet.toml").read_text())["nats"]
        named = {name: nats[name] for name in ("user", "password")}
        return {"servers": nats["url"], "inbox_prefix": nats["inbox"].encode(), **named}

    def pid(self, program: str) -> int:
        return int(self.record["programs"][program]["pid"])

    def worker_of(self, model: str, request: str) -> str:
        """Return where a request went, by its router, over plain NATS."""
        return str(self.explained(model, request)["decisions"][-1]["instance"])

    def explained(self, model: str, request: str) -> dict[str, Any]:
        """Return where a request went and why, by its router, over plain NATS."""

        async def ask() -> dict[str, Any]:
            client = await nats.connect(**self.nats)
            try:
                subject = subjects.explain("default", model)
                reply = await client.request(subject, request.encode(), timeout=ANSWER_LIMIT_S)
                answer: dict[str, Any] = json.loads(reply.data)
                return answer
            finally:
                await client.close()

        return asyncio.run(ask())

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in (self.state / "logs").glob("*.log"))

    def stop(self) -> int:
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_LIMIT_S)


@contextlib.contextmanager
def running(state: Path, *flags: str, variables: Mapping[str, str] = {}, python: str = sys.executable) -> Iterator[Up]:
    """`headrace up` on free ports, until it says ready; ended afterwards. Models are kept in the state directory."""
    with started(state, "up", *flags, variables=variables, python=python) as up:
        assert up.ready.wait(START_LIMIT_S), "".join(up.output)
        assert up.process.poll() is None, "".join(up.output) + up.logs()
        yield up


@contextlib.contextmanager
def started(
    state: Path,
    command: str,
    *flags: str,
    variables: Mapping[str, str] = {},
    within: Sequence[str] = (),
    python: str = sys.executable,
) -> Iterator[Up]:
    """`headrace up`, `route` or `picker` on free ports; ended afterwards. `within` are the words of a program that
    becomes it."""
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    environment |= {"HEADRACE_CACHE": str(state / "models"), **variables}
    process = subprocess.Popen(
        [
            *within,
            python,
            "-m",
            "deploy.local.cli",
            command,
            "--port",
            str(port),
            "--state",
            str(state),
            *ONE_EACH,
            *flags,
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output: list[str] = []
    up = Up(process, state, output)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith("ready "):
                up.ready.set()
        up.ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield up
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            reader.join(10)
            assert process.stdout is not None
            process.stdout.close()


def eventually(seen: Callable[[], T | None], *, limit_s: float, what: str) -> T:
    """The first truthy answer of `seen`, asked again and again until the deadline."""
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while True:
        answer = seen()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        pause.wait(0.05)
