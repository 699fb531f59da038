"""Asks a memory service of this machine what it keeps (services/worker/memory)."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from deploy.local.show.overview import SharedWeightsRow
from shared.errors import MALFORMED, Unavailable
from shared.pool.lock import SOCKET
from shared.socket_path import reachable

ANSWER_LIMIT_S = 2.0
"""Seconds that the service has for an answer."""
_PACKET_BYTES = 64 << 10

T = TypeVar("T")


class _Shown(Struct):
    rows: tuple[SharedWeightsRow, ...]


class _Freed(Struct):
    size_bytes: int
    held: tuple[str, ...]


def shared_rows(directory: Path) -> tuple[SharedWeightsRow, ...]:
    """Return the weights that the memory service in `directory` keeps. Raise Unavailable."""
    return _ask(directory, {"type": "show"}, _Shown).rows


def free_weights(directory: Path, model: str) -> tuple[int, tuple[str, ...]]:
    """Have the service release weights that no engine maps, of a model or all. Return their bytes, and the models whose
    weights stay. Raise Unavailable."""
    freed = _ask(directory, {"type": "free", "model": model}, _Freed)
    return freed.size_bytes, freed.held


def _ask(directory: Path, question: dict[str, str], kind: type[T]) -> T:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, ExitStack() as opened:
            connection.settimeout(ANSWER_LIMIT_S)
            connection.connect(reachable(str(directory / SOCKET), opened))
            connection.send(msgspec.json.encode(question))
            return msgspec.json.decode(connection.recv(_PACKET_BYTES), type=kind)
    except (OSError, *MALFORMED) as wrong:
        reason = getattr(wrong, "strerror", None) or wrong
        raise Unavailable(f"no answer from the memory service in {directory}: {reason}") from None
