"""What was measured of the copy paths, kept on disk: a file for each GPU, driver and shape of blocks.

A file that is torn, or another's, or of another format, is as good as none: it is measured anew, and written over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from services.worker.transfer.path_choice import Measured

FORMAT = 1
"""Grows with each change to the file, and to what is measured or how."""

_log = logging.getLogger(__name__)


class TableKey(Struct, frozen=True, forbid_unknown_fields=True):
    """What the figures depend on, as far as this process sees it."""

    gpu: str
    driver: str
    cupy: str
    fragments: int
    fragment_bytes: int
    even: bool
    """Whether fragments are evenly spaced."""
    blocks: tuple[int, ...]
    """Of the groups that are measured."""
    paths: tuple[str, ...]
    """That this driver and shape offer."""
    format: int = FORMAT


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    key: TableKey
    measured: list[Measured]


def read_table(directory: Path, key: TableKey) -> list[Measured] | None:
    """None: there is none that would do."""
    file = _file(directory, key)
    try:
        table = msgspec.json.decode(file.read_bytes(), type=_Table)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        _log.warning("%s is not used, copy paths are measured anew: %s", file, wrong)
        return None
    expected = {(path, loads, blocks) for path in key.paths for loads in (False, True) for blocks in key.blocks}
    whole = {(row.path, row.loads, row.blocks) for row in table.measured} == expected
    if table.key != key or not whole or any(row.took_s <= 0 or row.taken_s < 0 for row in table.measured):
        _log.warning("%s is not used, copy paths are measured anew: it is of something else", file)
        return None
    return table.measured


def write_table(directory: Path, key: TableKey, measured: list[Measured]) -> None:
    """All of it or nothing; where it cannot be written, that is said, and the next start measures again. So it does
    where a path failed, which has no rows then: it may work the next time."""
    if {row.path for row in measured} != {*key.paths}:
        return
    file = _file(directory, key)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{file.name}.", delete=False) as aside:
            try:
                aside.write(msgspec.json.format(msgspec.json.encode(_Table(key, measured)), indent=1))
                aside.flush()
                os.fsync(aside.fileno())
                Path(aside.name).replace(file)
            except BaseException:
                Path(aside.name).unlink()
                raise
    except OSError as wrong:
        _log.warning("what was measured of the copy paths is not kept: %s", wrong)


def _file(directory: Path, key: TableKey) -> Path:
    return directory / f"copy-paths-{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]}.json"
