"""Keeps the measured times of the copy paths on disk, in a file for each GPU, driver and shape of blocks.

A file that is torn, of another format or of another machine is ignored: the paths are measured again and the file is
written over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from services.worker.transfer.path_choice import PathTiming

FORMAT = 1
"""The version of the file, and of what is measured and how. Each change raises it."""

_log = logging.getLogger(__name__)


class TableKey(Struct, frozen=True, forbid_unknown_fields=True):
    """What the measured times depend on, as far as this process can see."""

    gpu: str
    driver: str
    cupy: str
    fragments: int
    fragment_bytes: int
    even: bool
    """Whether fragments are evenly spaced."""
    blocks: tuple[int, ...]
    """Blocks in each measured group."""
    paths: tuple[str, ...]
    """The paths that exist for this driver and shape."""
    format: int = FORMAT


class _StoredTimings(Struct, frozen=True, forbid_unknown_fields=True):
    key: TableKey
    measured: list[PathTiming]


def read_table(directory: Path, key: TableKey) -> list[PathTiming] | None:
    """Return the kept times, or None if there is no usable file."""
    file = _file(directory, key)
    try:
        table = msgspec.json.decode(file.read_bytes(), type=_StoredTimings)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        _log.warning("%s cannot be used, so the copy paths are measured again: %s", file, wrong)
        return None
    expected = {(path, loads, blocks) for path in key.paths for loads in (False, True) for blocks in key.blocks}
    whole = {(row.path, row.loads, row.blocks) for row in table.measured} == expected
    if table.key != key or not whole or any(row.took_s <= 0 or row.taken_s < 0 for row in table.measured):
        _log.warning("%s does not fit this machine, so the copy paths are measured again", file)
        return None
    return table.measured


def write_table(directory: Path, key: TableKey, measured: list[PathTiming]) -> None:
    """Write the times atomically. If that fails, it is logged, and the next start measures again.

    Nothing is written if a path failed, and so has no times: it may work at the next start.
    """
    if {row.path for row in measured} != {*key.paths}:
        return
    file = _file(directory, key)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{file.name}.", delete=False) as aside:
            try:
                aside.write(msgspec.json.format(msgspec.json.encode(_StoredTimings(key, measured)), indent=1))
                aside.flush()
                os.fsync(aside.fileno())
                Path(aside.name).replace(file)
            except BaseException:
                Path(aside.name).unlink()
                raise
    except OSError as wrong:
        _log.warning("the measured times of the copy paths cannot be kept, so each start measures: %s", wrong)


def _file(directory: Path, key: TableKey) -> Path:
    return directory / f"copy-paths-{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]}.json"
