"""A machine with a kvbm, a pool and an engine, as a process that does what its standard input says.

    python -m tests.kvbm.peer_machine DIRECTORY HOST:PORT BACKEND

Commands and answers are lines of JSON: store, load, forget, state, and read from another machine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import convert

from services.kvbm.config import PeerBackend, PeersConfig
from services.kvbm.peers.messages import PeerAddress
from services.kvbm.peers.peers import KvbmPeers
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreLayout
from tests.kvbm.chains import chain, keys
from tests.kvbm.store_rig import serving, until

LAYOUT = StoreLayout("m", "weights", KvLayout("float32", layers=1, kv_heads=2, head_dim=16384, block_size=1))
"""Blocks of 256 KiB."""
CONTENTS = chain(*range(1, 65))
LEND_S = 3.0


async def main(directory: Path, listen: str, backend: PeerBackend) -> None:
    peers = PeersConfig(listen=listen, lend_s=LEND_S, streams=2, backend=backend)
    async with serving(directory, instance=_instance(listen), size_bytes=80 << 20, peers=peers) as machine:
        engine = await machine.world.attached("engine", layout=LAYOUT)
        layout = machine.service.layouts.open[LAYOUT.digest]
        peer = machine.service.peers
        assert peer is not None
        await until(lambda: peer.nixl is None or peer.nixl.ready is not None)
        _say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked: dict[str, Any] = msgspec.json.decode(line)
            match asked["do"]:
                case "store":
                    _say({"stored": await engine.store(CONTENTS)})
                case "load":
                    _say({"right": (await engine.load(CONTENTS))[0]})
                case "forget":
                    await engine.discard(keys(CONTENTS))
                    _say({})
                case "read":
                    host, port = asked["at"].rsplit(":", 1)
                    there = PeerAddress(_instance(asked["at"]), host, int(port))
                    done = await peer.imports.read(there, layout, keys(CONTENTS), asked["limit_s"])
                    fault = "" if done.fault is None else done.fault.code
                    _say({"written": len(done.written), "fault": fault})
                case "state":
                    host_tier = layout.tiers.statistics().host
                    busy = host_tier.held + host_tier.writing + host_tier.quarantined
                    _say({"loans": len(peer.server.lender.loans), "busy": busy, "pid": _lending_pid(peer)})


def _lending_pid(peer: KvbmPeers) -> int:
    return os.getpid() if peer.nixl is None else 0 if peer.nixl.process is None else peer.nixl.process.pid


def _instance(at: str) -> str:
    return at.replace(".", "-").replace(":", "-")


def _say(answer: dict[str, Any]) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], convert(sys.argv[3], PeerBackend)))
