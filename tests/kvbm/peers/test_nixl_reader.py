"""The NIXL processes that read, without NIXL: what is started and kept."""

from __future__ import annotations

import pytest

from services.kvbm.peers.connections import PeerConnections, ReadParts
from services.kvbm.peers.messages import PeerAddress, PeerFault, PeerHello
from services.kvbm.peers.nixl_process import NixlProcess
from services.kvbm.peers.nixl_reader import NixlReader
from tests.kvbm.peer_rig import PEERS


def no_hello() -> PeerHello:
    raise AssertionError("nothing connects")


async def test_for_a_peer_that_has_left_no_process_is_started_that_no_read_would_end() -> None:
    started: list[str] = []

    def start() -> NixlProcess:
        started.append("a process")
        raise PeerFault("unreachable", "this test has none")

    connections = PeerConnections(PEERS, None, no_hello)
    reader = NixlReader(connections, start)
    with pytest.raises(PeerFault, match="the peer has left"):
        await reader.prepare(PeerAddress("gone", "127.0.0.1", 1), ReadParts(0.0))
    assert started == []
    await reader.close()
    connections.close()
