"""ReportFiles: what a vLLM that only encodes says to its connector's scheduler half, in files.

    save_caches ─▶ put ─▶ a file in the engine's own directory ─▶ take, when vLLM ends the request

vLLM's runner on a CPU drops what a connector of such an engine has to report of a step. A request ends after its step,
so that its images are there then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import msgspec

_FORMAT = msgspec.msgpack.Decoder(tuple[dict[str, bytes], float])
_log = logging.getLogger(__name__)


class ReportFiles:
    """One writer and one reader, in one process or in two. There are no more images in files than the reader has asked
    for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count(1)

    def put(self, encoded: Mapping[str, bytes], image_s: float) -> None:
        """Report images, each with its embeddings, and the seconds that each took. Where a file cannot be written, they
        are lost, and the log says so."""
        file = self._directory / f"{next(self._numbers):012d}.images"
        try:
            fresh = file.with_suffix(".new")
            fresh.write_bytes(msgspec.msgpack.encode((encoded, image_s)))
            fresh.rename(file)
        except OSError as wrong:
            _log.warning("embeddings of %d images are not stored: %s", len(encoded), wrong)

    def take(self) -> list[tuple[dict[str, bytes], float]]:
        """Return what was reported since the last call, oldest first."""
        taken = []
        for file in sorted(self._directory.glob("*.images")):
            taken.append(_FORMAT.decode(file.read_bytes()))
            file.unlink()
        return taken
