"""services/worker/attached/engine.py: a worker of a server that answers as a test wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.config import AttachedConfig, WorkerConfig
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering
from tests.worker.shell import WORKER, running_worker


@pytest.mark.parametrize("events", ["", "tcp://127.0.0.1:9"])
async def test_routers_hear_of_a_source_of_events_only_if_the_server_has_one(tmp_path: Path, events: str) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    async with answering(Peer(model)) as peer:
        attached = AttachedConfig(url=peer.url, events=events)
        async with running_worker(WorkerConfig(model=str(model), engine="attached", attached=attached)) as shell:
            await shell.peer.until(lambda: bool(shell.directory.cards) and WORKER in shell.directory.instances)
            assert (shell.directory.instances[WORKER].events is not None) == bool(events)
