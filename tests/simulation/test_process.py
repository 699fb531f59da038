from __future__ import annotations

import asyncio
from random import Random

from shared.bus.memory_bus import MemoryBroker
from shared.discovery.memory import MemoryStore
from tests.fakes.memory_sockets import MemorySockets
from tests.simulation.clock import SimulatedLoop
from tests.simulation.events import KeptEvents
from tests.simulation.plan import plan
from tests.simulation.process import NAMESPACE, Process


def test_a_frozen_process_that_lost_its_lease_is_not_published_before_it_is_thawed() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        store = MemoryStore(ttl_s=1.0)
        broker = MemoryBroker()
        worker = Process(
            *(loop, broker, store, "worker", "w1", Random(1)),
            sizes=plan(1).sizes,
            sockets=MemorySockets(),
            kept_events=KeptEvents(NAMESPACE, broker.delivery, 10),
        )
        await asyncio.sleep(1.0)
        assert len(store.found("")) == 2
        worker.freeze()
        await asyncio.sleep(1.1)
        for _ in range(10):
            assert store.found("") == {}
            await asyncio.sleep(0.5)
        worker.thaw()
        await asyncio.sleep(0.1)
        assert len(store.found("")) == 2
        worker.stop()
        await worker.main

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
