"""A worker's telemetry of GPUs alone: `python -m tests.nvml.metrics_program LIMIT_S [GPU …]`.

Each line on standard input is answered by what /metrics would show, and an empty line.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

from prometheus_client import CollectorRegistry, generate_latest

from services.worker.reports.gpus import GpuTelemetry


async def show(limit_s: float, gpus: tuple[str, ...]) -> None:
    registry = CollectorRegistry()
    telemetry = GpuTelemetry(registry, interval_s=0.01, limit_s=limit_s)
    telemetry.watch(gpus)
    reading = asyncio.create_task(telemetry.run())
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line.strip())
        loop.call_soon_threadsafe(lines.put_nowait, "end")

    threading.Thread(target=read, daemon=True).start()
    while (line := await lines.get()) != "end":
        if line == "restart":
            telemetry.watch(gpus)
        threads = [thread.name for thread in threading.enumerate()]
        print(f"# threads: {' '.join(threads)}\n{generate_latest(registry).decode()}", flush=True)
    reading.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    asyncio.run(show(float(sys.argv[1]), tuple(sys.argv[2:])))
