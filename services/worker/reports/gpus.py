"""What NVML says of the engine's GPUs, at /metrics.

    Ready.gpus ──▶ GpuTelemetry ── one question at a time ──▶ a thread ──▶ NvmlReader ──▶ the driver
                        │ the last answer                        │
    /metrics ◀── GpuSeries ◀──────────────────────── GpuReadings ┘

A driver may hang in any call. So a scrape shows the last answer and asks nothing; if an answer is late, the series end
until it comes, and nothing else is asked meanwhile. The thread is a daemon: no process waits for it at its end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.worker.reports.nvml import GpuReading, GpuReadings, NvmlReader
from shared.metrics import counter, gauge, register_metrics, rows_of, scraped

INTERVAL_S = 2.0
"""Seconds between two readings."""
LIMIT_S = 10.0
"""Seconds after which an answer of NVML is late."""
NVML = "NVML"
"""The name of NVML itself among the names of GPUs."""

_log = logging.getLogger(__name__)
_Answer = GpuReadings | str
"""The readings, or why there are none."""
_Question = tuple[int, tuple[str, ...], "asyncio.Future[_Answer]"]
"""The number of the engine's start, the names of its GPUs, and where the answer goes."""


class GpuSeries(Collector):
    """The series of the last readings. The rows have the names that GpuReading gives the numbers."""

    # fmt: off
    utilization = gauge("headrace_gpu_utilization_ratio", "gpu uuid",
        "Share of the last second in which the GPU computed anything, by NVML, as all `headrace_gpu_…` with the label "
        "`gpu`, its number in `nvidia-smi`. They count all processes of the GPU",
        "Near 1 a GPU can still have room: kernels may use a part of it. See `headrace_gpu_power_watts`.")
    memory_used = gauge("headrace_gpu_memory_used_bytes", "gpu uuid", "Memory of the GPU that is used by any process")
    memory_size = gauge("headrace_gpu_memory_size_bytes", "gpu uuid", "Memory of the GPU")
    power = gauge("headrace_gpu_power_watts", "gpu uuid", "Power that the GPU takes")
    power_limit = gauge("headrace_gpu_power_limit_watts", "gpu uuid",
        "Power that the GPU takes at most", "`nvidia-smi -pl` sets it.")
    energy = counter("headrace_gpu_energy_joules", "gpu uuid",
        "Energy that the GPU has taken since its driver was loaded")
    temperature = gauge("headrace_gpu_temperature_celsius", "gpu uuid", "Temperature of the GPU")
    slowdown_margin = gauge("headrace_gpu_slowdown_margin_celsius", "gpu uuid",
        "Degrees below the temperature at which the GPU slows down", "At 0 it is slowed down: cool it.")
    throttled = gauge("headrace_gpu_throttled", "gpu uuid reason",
        "1 if the clocks are lower now because of the reason: power_cap (the limit of its power), thermal, power_brake "
        "(the server's power supply)",
        "[monitoring.md](monitoring.md#headracegputhrottled)")
    ecc_errors = counter("headrace_gpu_ecc_errors", "gpu uuid kind",
        "Errors of the GPU's memory since the driver was loaded: corrected, uncorrected",
        "`uncorrected`: the engine is lost at one. Again and again: the GPU must be replaced.")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        self.readings: tuple[GpuReading, ...] = ()
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Describe the metrics, so that the registry refuses others of the same names."""
        return (scraped(row) for row in rows_of(GpuSeries).values())

    def collect(self) -> Iterator[Metric]:
        for field, row in rows_of(GpuSeries).items():
            family = scraped(row)
            for reading in self.readings:
                labels, value = [str(reading.number), reading.uuid], getattr(reading, field)
                for last, number in value.items() if isinstance(value, dict) else ((None, value),):
                    if number is not None:
                        family.add_metric(labels if last is None else [*labels, last], number)
            if family.samples:
                yield family


class GpuTelemetry:
    """Reads the GPUs of the engine that was ready last."""

    # fmt: off
    _xids = counter("headrace_gpu_xid_errors", "gpu uuid xid",
        "Xid errors of the GPU that its driver has reported, by number",
        "The worker's log has each. NVIDIA's list of Xid errors says what each number means.")
    # fmt: on

    def __init__(
        self, registry: CollectorRegistry, *, interval_s: float = INTERVAL_S, limit_s: float = LIMIT_S
    ) -> None:
        register_metrics(self, registry)
        self._series = GpuSeries(registry)
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._names: tuple[str, ...] = ()
        self._starts = 0
        """How many engines with GPUs were ready so far."""
        self._any = asyncio.Event()
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._said: dict[str, str] = {}
        """Name of a GPU, or NVML → why it cannot be read, as the log says."""

    def watch(self, names: tuple[str, ...]) -> None:
        """Show these GPUs of an engine that is ready, by PCI bus id or UUID. Without any, nothing changes."""
        if names:
            self._names = names
            self._starts += 1
            self._any.set()

    async def run(self) -> None:
        """Read the GPUs until cancelled, once there are any."""
        await self._any.wait()
        loop = asyncio.get_running_loop()
        threading.Thread(target=_answer_all, args=(self._questions, loop), name="nvml", daemon=True).start()
        try:
            while True:
                await self._read(loop)
                await asyncio.sleep(self._interval_s)
        finally:
            self._questions.put(None)

    async def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        answer: asyncio.Future[_Answer] = loop.create_future()
        self._questions.put((self._starts, self._names, answer))
        try:
            async with asyncio.timeout(self._limit_s):
                read = await asyncio.shield(answer)
        except TimeoutError:
            self._series.readings = ()
            self._failed(NVML, f"no answer for {self._limit_s:g} s")
            read = await answer
        self._take(read)

    def _take(self, read: _Answer) -> None:
        if isinstance(read, str):
            self._series.readings = ()
            self._failed(NVML, read)
            return
        self._series.readings = read.gpus
        for name, reason in read.failed.items():
            self._failed(name, reason)
        for name in self._said.keys() - read.failed.keys():
            del self._said[name]
            _log.info("%s: the GPU's metrics are there again", name)
        for error in read.xids:
            self._xids.labels(str(error.number), error.uuid, str(error.xid)).inc()
            _log.error("GPU %d (%s): its driver reports Xid %d", error.number, error.uuid, error.xid)

    def _failed(self, name: str, reason: str) -> None:
        """Say once why a GPU, or NVML, cannot be read."""
        if self._said.get(name) != reason:
            self._said[name] = reason
            _log.warning("%s: the GPU's metrics are not shown until it can be read: %s", name, reason)


def _answer_all(questions: SimpleQueue[_Question | None], loop: asyncio.AbstractEventLoop) -> None:
    """Answer questions until None comes, or the loop is closed."""
    reader: NvmlReader | None = None
    of_start = 0
    while (question := questions.get()) is not None:
        start, names, answer = question
        read: _Answer
        try:
            if reader is not None and start != of_start:
                former, reader = reader, None  # a GPU that was lost is found again only by a new one
                former.close()
            if reader is None:
                reader, of_start = NvmlReader(names), start
            read = reader.read()
        except ImportError:
            read = "nvidia-ml-py is not installed in the worker's environment: pip install nvidia-ml-py"
        except Exception as wrong:  # noqa: BLE001 - whatever NVML raises costs its metrics, not the worker
            read = f"{type(wrong).__name__}: {wrong}"
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set, answer, read)


def _set(answer: asyncio.Future[_Answer], read: _Answer) -> None:
    if not answer.done():
        answer.set_result(read)
