"""The numbers of a real GPU by NVML, next to what CUDA says of the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.device import cupy_on_a_device
from tests.integration.stack import eventually
from tests.nvml.telemetry import LIMIT_S, Series, telemetry

cp = cupy_on_a_device()
pytestmark = pytest.mark.gpu
ALL_HAVE = ("memory_used_bytes", "memory_size_bytes", "power_watts", "temperature_celsius")
"""Numbers that each GPU has that a worker runs on, MIG or not."""


def numbers(series: Series) -> dict[str, float]:
    """The metrics without further labels, of the one GPU that is shown."""
    assert len({each[1:3] for each in series}) <= 1
    return {each[0].removeprefix("headrace_gpu_"): value for each, value in series.items() if len(each) == 3}


def test_a_real_gpu_is_found_by_cudas_bus_id_and_its_numbers_are_those_of_cuda(tmp_path: Path) -> None:
    runtime = cp.cuda.runtime
    bus_id = runtime.deviceGetPCIBusId(runtime.getDevice())
    with telemetry({}, tmp_path, bus_id) as shown:
        found = numbers(shown.until(lambda series: bool(series)))
        free, size = runtime.memGetInfo()
        assert set(ALL_HAVE) <= found.keys(), (found, shown.log)
        assert abs(found["memory_size_bytes"] - size) < 0.1 * size
        used = found["memory_used_bytes"]
        held = cp.zeros(min(2 << 30, free // 2), cp.uint8)
        cp.cuda.Device().synchronize()
        shown.until(lambda series: numbers(series)["memory_used_bytes"] >= used + held.nbytes // 2)
        assert 0 < found["temperature_celsius"] < 110
        assert 1 < found["power_watts"] < 2000
        assert not [line for line in shown.log if "GPU" not in line or "Xid" not in line], shown.log


def test_the_energy_of_a_real_gpu_grows_while_it_computes(tmp_path: Path) -> None:
    runtime = cp.cuda.runtime
    with telemetry({}, tmp_path, runtime.deviceGetPCIBusId(runtime.getDevice())) as shown:
        before = numbers(shown.until(lambda series: bool(series)))
        if "energy_joules_total" not in before:
            pytest.skip("this GPU counts no energy")
        matrix = cp.ones((4096, 4096), cp.float32)

        def computed() -> bool:
            for _ in range(20):
                matrix @ matrix
            cp.cuda.Device().synchronize()
            now = numbers(shown.series())
            return now["energy_joules_total"] > before["energy_joules_total"] and now.get("utilization_ratio", 1) > 0

        eventually(computed, limit_s=LIMIT_S, what="energy and utilization grow")
