"""Headrace serves language models from many workers: `python -m headrace --help`.

    from headrace import local

    with local("--engine", "echo") as server:
        client = openai.OpenAI(base_url=server.url, api_key="any")

It is one process and its engine (docs/single.md). This is `headrace/__init__.py` of the wheel.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Self

__all__ = ["TREE", "Local", "local"]

TREE = Path(__file__).resolve().with_name("tree")
"""The directory of Headrace's own packages, which only its own programs have on their path. A `vllm serve` that uses
the KV connector needs it in PYTHONPATH."""
STOP_LIMIT_S = 60.0
"""The seconds that running requests and processes have to end."""
LEAST = ("--discovery", "file", "--frontends", "1", "--routers", "1", "--workers", "1", "--kvbm-bytes", "0")
"""The flags of the smallest `up` of several processes; those of the caller come after them."""


class Local:
    """A running `headrace up` for notebooks and tests of applications. It ends with `close`, with its `with` block, or
    when this process ends by itself; one that a signal ends leaves it."""

    def __init__(self, flags: tuple[str, ...], limit_s: float, *, single: bool) -> None:
        """Start it, and wait until it is ready. Raise RuntimeError with its last line if it ends before that."""
        self._owner = os.getpid()
        self._state = Path(tempfile.mkdtemp(prefix="headrace-local-"))
        said = self._state / "up.log"
        command = [sys.executable, "-P", "-m", "headrace", "up", "--state", str(self._state), "--port", _free_port()]
        with said.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*command, *(("--single",) if single else LEAST), *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,  # Ctrl-C reaches this process alone, which then ends it
            )
        atexit.register(self.close)
        limit = threading.Timer(limit_s, self._process.kill)
        limit.start()
        try:
            assert self._process.stdout is not None
            self.url = _ready(self._process.stdout, said)
        except BaseException:
            self.close()
            raise
        finally:
            limit.cancel()

    def close(self) -> None:
        """End it: requests that run finish first. A second call does nothing, and so does one of a forked child."""
        if os.getpid() != self._owner:
            return
        if self._process.poll() is None:
            self._process.terminate()  # no SIGINT: a shell's background jobs ignore it, and so does what they start
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its programs die with it
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._state, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server."""
        self.close()


def local(*flags: str, single: bool = True, limit_s: float = 600.0) -> Local:
    """Start `headrace up --single` with these flags, on a free port and with a temporary state directory; its `url` is
    the base URL for an OpenAI client. Without `single` it is the smallest `up` of several processes, for what --single
    refuses. Raise RuntimeError if it is not ready within `limit_s`."""
    return Local(flags, limit_s, single=single)


def _ready(output: IO[str], said: Path) -> str:
    """Return the URL that it prints once requests are served. Raise RuntimeError if it prints none."""
    for line in output:
        word, _, url = line.strip().partition(" ")
        if word == "ready":
            return url
    lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise RuntimeError(lines[-1] if lines else "headrace up was not ready in time")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
