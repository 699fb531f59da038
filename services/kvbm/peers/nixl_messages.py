"""What a kvbm and its NIXL processes say to each other on a socket pair, as frames of msgpack. Pure.

process ──▶ kvbm     NixlReady, or NixlFailed and the process ends
kvbm ──▶ lending     SetLending: whether peers may be reading now ──▶ NixlAlive now and then, while they may
kvbm ──▶ reading     Pull ──▶ Pulled, in order, until all blocks have come; or NixlFailed, and the process ends
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.codec import Codec

NixlRole = Literal["lend", "read"]
ALIVE_S = 0.5
"""Seconds between two NixlAlive."""


class NixlStart(Struct, frozen=True):
    """What a NIXL process is started with, as JSON in its one argument."""

    role: NixlRole
    agent: str
    """The name of its agent, which no other agent ever has."""
    parent: int
    """PID of the kvbm. The NIXL process exits when that process exits."""
    control: int
    """The descriptor of its end of the socket pair."""
    pool: int
    """The descriptor of the pool's file."""


class NixlReady(Struct, frozen=True, tag="ready"):
    """The agent runs, and has the pool's slots registered."""

    metadata: bytes
    base: int
    """The address of a byte of the pool's file in that process, less the byte's offset in the file."""


class NixlAlive(Struct, frozen=True, tag="alive"):
    """The lending process serves its peers; sent every ALIVE_S while they may be reading."""


class NixlFailed(Struct, frozen=True, tag="failed"):
    """NIXL does not do what was asked. The process ends."""

    reason: str


class SetLending(Struct, frozen=True, tag="lending"):
    """Serve reads, or rest."""

    on: bool


class Pull(Struct, frozen=True, tag="pull"):
    """Read blocks of another process's memory into the pool."""

    metadata: bytes
    """What the lender's agent says of itself."""
    addresses: list[int]
    offsets: list[int]
    """Where in the pool's file each block goes."""
    block_bytes: int


class Pulled(Struct, frozen=True, tag="pulled"):
    """The next blocks of a Pull have come: the XXH3-64 of what lies in the pool now."""

    checksums: list[int]


NixlOrder = SetLending | Pull
NixlReport = NixlReady | NixlAlive | NixlFailed | Pulled
NIXL_ORDER: Codec[NixlOrder] = Codec(NixlOrder, "order for a NIXL process")
NIXL_REPORT: Codec[NixlReport] = Codec(NixlReport, "report of a NIXL process")


def plan_batches(blocks: int, block_bytes: int, batch_bytes: int) -> list[range]:
    """Divide the blocks of a Pull into transfers of about `batch_bytes`."""
    size = max(1, batch_bytes // block_bytes)
    return [range(at, min(blocks, at + size)) for at in range(0, blocks, size)]
