"""CheckpointFiles: how a worker and a tool that freezes processes talk to each other, in files that are there or not.

    <directory>/<instance id>/
        ready          the worker: it sleeps, without a connection, and may be frozen
        checkpointed   the tool: it has an image, and this process is to end
        restored       the tool: this process goes on, whether it was frozen or not

Each sleep has a directory of its own, that of the instance id under which the worker slept, which it never has again.
So nothing of an earlier sleep is taken for an answer, and several workers may share the directory above. It does not
matter what is in the files, how often they are written, or in which order they are seen: `restored` counts more,
because an image has a process that still waits, and it may find the `checkpointed` that ended the original.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError

READY, CHECKPOINTED, RESTORED = "ready", "checkpointed", "restored"
POLL_S = 0.2
"""Seconds between two looks for the tool's files: a watch of the kernel's would be in the image."""

Verdict = Literal["wait", "end", "go on"]


class CheckpointFiles:
    """The files of one sleep."""

    def __init__(self, directory: Path, instance: str) -> None:
        self.directory = directory / instance

    def open(self) -> None:
        """Say that the worker may be frozen. Raise OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / READY).touch()

    def close(self) -> None:
        """Say that it must not be frozen any longer. What the tool wrote stays, for other copies of the image."""
        with suppress(OSError):
            (self.directory / READY).unlink(missing_ok=True)

    def look(self) -> Verdict:
        """Return what the tool wants. A directory that cannot be read says nothing."""
        if _is_there(self.directory / RESTORED):
            return "go on"
        return "end" if _is_there(self.directory / CHECKPOINTED) else "wait"

    async def wait(self, ended: Callable[[], bool]) -> Verdict:
        """Wait until the tool has answered, or `ended` holds. There is no limit on purpose: an image may lie for years,
        and only the tool knows what becomes of it."""
        while (verdict := self.look()) == "wait" and not ended():  # noqa: ASYNC110 - other processes write the files
            await asyncio.sleep(POLL_S)
        return verdict


def make_directory(directory: str) -> None:
    """Make the directory of all sleeps. Raise ConfigError if it cannot be made, or not be written to."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise ConfigError(f"checkpoint.directory: {directory}: {wrong.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"checkpoint.directory: {directory}: it cannot be written to")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
