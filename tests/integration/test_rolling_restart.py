"""Every service is restarted in turn under load: each ends by itself in time, and no client sees more than a pause.

Real processes, two of each, real NATS and etcd, a small model's real arithmetic: greedy answers are compared.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.integration.fleet import fleet
from tests.integration.rolling import NUMBERS, ORDER, restart_each_in_turn, start
from tests.tiny_model import write_tiny_model


async def test_restarting_every_service_in_turn_under_load_loses_nothing(
    tmp_path: Path, nats_url: str, etcd_endpoint: str
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    with fleet(tmp_path, nats_url, "--namespace", "rolling", "--discovery-endpoints", etcd_endpoint) as services:
        for service in ORDER:
            for number in NUMBERS:
                start(services, service, number, model)
        await asyncio.to_thread(services.wait_ready)
        await restart_each_in_turn(services, nats_url, "rolling", model)
