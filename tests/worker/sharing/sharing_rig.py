"""Two processes that share and read, for tests; both kinds of memory."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from tests.integration.stack import ROOT
from tests.worker.sharing.sharing_process import Settings, block_of, digest


class PeerProcess:
    """A process of `peer_process`, which a test commands."""

    def __init__(self, role: str, settings: Settings) -> None:
        self.settings = settings
        words = [sys.executable, "-m", "tests.worker.sharing.sharing_process", role]
        words.append(msgspec.json.encode(settings).decode())
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ready(self) -> PeerProcess:
        assert self.heard() == "ready"
        return self

    def ask(self, name: str, *arguments: Any) -> Any:
        """Command, and wait for the answer."""
        self.tell(name, *arguments)
        return self.heard()

    def tell(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode((name, arguments)) + b"\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        """Return the next line; it must come."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.settings.owner} has ended with {self.process.wait()}"
        return msgspec.json.decode(line)

    def blocks(self, seed: int = 0) -> list[str]:
        """Return the digests of the blocks that a sharer of this shape has."""
        sizes = range(self.settings.slots), self.settings.block_bytes
        return [digest(block_of(seed, slot, sizes[1])) for slot in sizes[0]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class PeerRig:
    """Starts processes with the same settings, and ends them."""

    def __init__(self, directory: Path, opened: ExitStack, **settings: Any) -> None:
        (directory / "owners").mkdir(mode=0o700)
        directory.chmod(0o700)
        self._settings = {"directory": str(directory), **settings}
        self._opened = opened

    def start(self, role: str, owner: str, **settings: Any) -> PeerProcess:
        process = PeerProcess(role, Settings(owner=owner, **(self._settings | settings)))
        self._opened.callback(process.close)
        return process

    def pair(self, reader: dict[str, Any] | None = None, **sharer: Any) -> tuple[PeerProcess, PeerProcess]:
        """Start a sharer and a reader."""
        both = self.start("share", "sharer", **sharer), self.start("read", "reader", **(reader or {}))
        return both[0].ready(), both[1].ready()

    def connected(self, reader: dict[str, Any] | None = None, **sharer: Any) -> tuple[PeerProcess, PeerProcess]:
        """Start a sharer, and a reader that has mapped its memory."""
        shares, reads = self.pair(reader, **sharer)
        assert reads.ask("connect", "sharer") == ""
        return shares, reads
