"""Keeps the lending NIXL process of a kvbm running: it is started again when it has ended.

starting ──NixlReady──▶ ready ──it ends──▶ waiting, RESTART_S ──▶ starting        close: killed, from any state
                          └─ while it lends: no NixlAlive for SILENT_S ──▶ it is killed

UCX connects to a reader in a call that waits, for minutes if the reader's machine is cut off: it serves no other then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from services.kvbm.peers.messages import PeerFault
from services.kvbm.peers.nixl_messages import NixlReady, SetLending
from services.kvbm.peers.nixl_process import NixlProcess

SILENT_S = 3.0
"""Seconds without a word of a process that lends, after which it is killed."""
RESTART_S = 1.0
"""Seconds between the end of the process and the next start."""

_log = logging.getLogger(__name__)


class NixlLender:
    """The lending process of one kvbm, made in the event loop. `start` starts one, and is called in a thread."""

    def __init__(self, start: Callable[[], NixlProcess], ended: Callable[[], None]) -> None:
        """`ended` is called when the process has ended: what its peers were reading has no end otherwise."""
        self.ready: NixlReady | None = None
        """What the running process is to peers. None if it does not run."""
        self.process: NixlProcess | None = None
        self._start = start
        self._ended = ended
        self._lending = False
        self._closing = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "nixl-lend")
        self._task: asyncio.Task[None] | None = None
        self._silent: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Start the process, and keep it running."""
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Return when the process has ended."""
        self._closing.set()
        if self.process is not None:
            self.process.cut()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._thread.shutdown(wait=False)

    def set_lending(self, on: bool) -> None:
        """Let the process serve peers, or rest."""
        if on != self._lending:
            self._lending = on
            self._say()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing.is_set():
            try:
                process = await loop.run_in_executor(self._thread, self._start)
                self.process = process
                if self._closing.is_set():
                    process.cut()
                self.ready = await loop.run_in_executor(self._thread, process.begin)
                self._say()
                while True:
                    await loop.run_in_executor(self._thread, process.receive)
                    self._arm()
            except PeerFault as wrong:
                if not self._closing.is_set():
                    _log.error("no blocks are lent: %s; it is started again in %g s", wrong, RESTART_S)
            self.ready = None
            self._disarm()
            if self.process is not None:
                await loop.run_in_executor(self._thread, self.process.close)
                self.process = None
                self._ended()
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTART_S):
                    await self._closing.wait()

    def _say(self) -> None:
        if self.process is not None and self.ready is not None:
            with suppress(PeerFault):  # it was killed; `_keep` starts another one
                self.process.send(SetLending(self._lending))
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        if self._lending and self.process is not None:
            self._silent = asyncio.get_running_loop().call_later(SILENT_S, self.process.cut)

    def _disarm(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None
