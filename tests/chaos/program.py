"""One process of the stack, that is started again and again under one name.

    down ──start──▶ running ──kill, terminate──▶ down
                     │  ▲
                freeze  thaw
                     ▼  │
                    frozen

It dies with this one, even if this one is killed. Made and used in one event loop, whose thread is the main one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.chaos.verdict import Sample
from tests.process_tree import children

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
"""On a busy machine."""
STOP_LIMIT_S = 120.0
"""Above every service's own bound."""
_POLL_S = 0.05
_TETHER = (sys.executable, "-I", "-S", str(ROOT / "deploy" / "local" / "stack" / "die_with_parent.py"))
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Program:
    """`ready` asks the running process whether it serves."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        ready: Callable[[], Awaitable[bool]],
        *,
        drained: tuple[int, ...] = (0,),
    ) -> None:
        """`drained`: how it may end after SIGTERM."""
        self.name = name
        self.log = log
        self.ready = ready
        self._arguments = arguments
        self._drained = drained
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns when the process runs; it need not be ready."""
        assert not self.running, f"{self.name} already runs"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *_TETHER, str(os.getpid()), *self._arguments, cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    async def until_ready(self) -> None:
        """Raises RuntimeError with the end of its log."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not await self.ready():
                    if not self.running:
                        raise RuntimeError(f"{self.name} ended:\n{self.told()}")
                    await asyncio.sleep(_POLL_S)  # another process: there is nothing to wait on
        except TimeoutError:
            raise RuntimeError(f"{self.name} is not ready:\n{self.told()}") from None

    def told(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    async def kill(self) -> None:
        """Returns when it is gone."""
        if self.running:
            assert self._process is not None
            self._process.kill()
            await self._process.wait()

    async def terminate(self) -> str:
        """SIGTERM; what was wrong with its end, or nothing."""
        assert self._process is not None
        if self.running:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                status = await self._process.wait()
        except TimeoutError:
            await self.kill()
            return f"{self.name} did not end within {STOP_LIMIT_S:g} s"
        return "" if status in self._drained else f"{self.name} ended with status {status}"

    def freeze(self) -> None:
        for pid in (self.pid, *children(self.pid)):
            with suppress(ProcessLookupError):  # an engine may have ended meanwhile
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in (*children(self.pid), self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def sample(self, at_s: float) -> list[Sample]:
        """Its size, and its children's."""
        pids = [(self.name, self.pid), *((f"{self.name}'s engine", pid) for pid in children(self.pid))]
        samples: list[Sample] = []
        for name, pid in pids:
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            except OSError:
                continue  # it has just ended
            samples.append(Sample(at_s, name, pid, pages * _PAGE_BYTES, fds))
        return samples
