"""The worker's own process with a paced engine: `python -m tests.chaos.paced_worker --config worker.toml`."""

from __future__ import annotations

from functools import partial

from services.worker.__main__ import drain_limit_s
from services.worker.config import WorkerConfig
from services.worker.engine.process import EngineProcess
from services.worker.service import Worker
from shared.runtime.lifecycle import Service, run
from shared.runtime.runtime import Runtime


async def serve(runtime: Runtime, config: WorkerConfig) -> None:
    """Until `runtime.stopping`."""
    await Worker(runtime, config, partial(EngineProcess.start, module="tests.chaos.paced_engine")).run()


if __name__ == "__main__":
    run(Service("worker", WorkerConfig, serve, drain_limit_s))
