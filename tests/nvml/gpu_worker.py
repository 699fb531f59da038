"""The worker's own process with an engine that computes on a CPU and names a GPU: `python -m tests.nvml.gpu_worker …`.

With the environment of a `Driver` it shows that GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from services.worker.__main__ import drain_limit_s, served_labels
from services.worker.config import WorkerConfig
from services.worker.contracts.messages import EngineReport, Ready
from services.worker.engine.process import EngineProcess
from services.worker.service import Worker
from shared.runtime.lifecycle import Service, run
from shared.runtime.runtime import Runtime
from tests.nvml.driver import bus_id


@dataclass(frozen=True)
class EngineOnAGpu(EngineProcess):
    async def receive(self) -> EngineReport:
        report = await super().receive()
        return replace(report, gpus=(bus_id(0),)) if isinstance(report, Ready) else report


async def start(config: WorkerConfig, model_name: str, instance: str) -> EngineOnAGpu:
    engine = await EngineProcess.start(config, model_name, instance)
    return EngineOnAGpu(engine.process, engine.channel)


async def serve(runtime: Runtime, config: WorkerConfig) -> None:
    """Serve until `runtime.stopping`."""
    await Worker(runtime, config, start).run()


if __name__ == "__main__":
    run(Service("worker", WorkerConfig, serve, drain_limit_s, labels=served_labels))
