"""A worker's GPUs at /metrics, as NVML says them; each test has a driver of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.reports.nvml import THROTTLES
from tests.integration.stack import eventually
from tests.nvml.driver import MISSING, Driver, bus_id
from tests.nvml.telemetry import LIMIT_S, telemetry

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def test_all_numbers_of_each_gpu_are_shown_by_its_number_and_uuid(tmp_path: Path) -> None:
    driver = Driver(tmp_path, gpus=3)
    driver.set(2, temperature=70, margin=None, slowdown=87, throttled=THROTTLES["thermal"] | 0x08)
    with telemetry(driver.environment, tmp_path, bus_id(1), "GPU-2") as shown:
        found = shown.until(lambda series: len(series) > 1)
    assert {series: value for series, value in found.items() if series[1] == "1"} == {
        ("headrace_gpu_utilization_ratio", "1", "GPU-1"): 0.73,
        ("headrace_gpu_memory_used_bytes", "1", "GPU-1"): 60 << 30,
        ("headrace_gpu_memory_size_bytes", "1", "GPU-1"): 140 << 30,
        ("headrace_gpu_power_watts", "1", "GPU-1"): 512.5,
        ("headrace_gpu_power_limit_watts", "1", "GPU-1"): 700.0,
        ("headrace_gpu_energy_joules_total", "1", "GPU-1"): 9000.5,
        ("headrace_gpu_temperature_celsius", "1", "GPU-1"): 61.0,
        ("headrace_gpu_slowdown_margin_celsius", "1", "GPU-1"): 26.0,
        ("headrace_gpu_throttled", "1", "GPU-1", "power_cap"): 0.0,
        ("headrace_gpu_throttled", "1", "GPU-1", "thermal"): 0.0,
        ("headrace_gpu_throttled", "1", "GPU-1", "power_brake"): 0.0,
        ("headrace_gpu_ecc_errors_total", "1", "GPU-1", "corrected"): 3.0,
        ("headrace_gpu_ecc_errors_total", "1", "GPU-1", "uncorrected"): 0.0,
    }
    assert found["headrace_gpu_slowdown_margin_celsius", "2", "GPU-2"] == 17.0
    assert found["headrace_gpu_throttled", "2", "GPU-2", "thermal"] == 1.0
    assert found["headrace_gpu_throttled", "2", "GPU-2", "power_cap"] == 0.0
    assert {series[1] for series in found} == {"1", "2"}, "GPU 0 is another worker's"
    assert shown.log == []


def test_a_number_that_a_gpu_does_not_have_is_left_out_alone(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.set(0, power=None, margin=None, throttled=None, corrected=None, uncorrected=None, utilization=None)
    with telemetry(driver.environment, tmp_path, bus_id(0)) as shown:
        found = shown.until(lambda series: bool(series))
    assert {series[0].removeprefix("headrace_gpu_") for series in found} == {
        *("memory_used_bytes", "memory_size_bytes", "power_limit_watts", "energy_joules_total", "temperature_celsius"),
    }
    assert shown.log == []


def test_parts_of_one_gpu_show_the_whole_gpu_once(tmp_path: Path) -> None:
    with telemetry(Driver(tmp_path, gpus=2).environment, tmp_path, "MIG-1", bus_id(1)) as shown:
        found = shown.until(lambda series: bool(series))
    assert {series[1:3] for series in found} == {("1", "GPU-1")}


def test_a_driver_that_hangs_takes_the_metrics_away_until_it_answers_and_stops_nothing_else(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    with telemetry(driver.environment, tmp_path, bus_id(0), limit_s=0.3) as shown:
        shown.until(lambda series: bool(series))
        driver.set(0, hang=1, temperature=62)
        shown.until(lambda series: not series)
        said = shown.log
        assert said[-1] == "WARNING NVML: the GPU's metrics are not shown until it can be read: no answer for 0.3 s"
        for _ in range(20):  # nothing waits for the driver
            assert not shown.series()
        assert shown.log == said
        driver.set(0, hang=None)
        shown.until(lambda series: series.get(("headrace_gpu_temperature_celsius", "0", "GPU-0")) == 62.0)
        assert "INFO NVML: the GPU's metrics are there again" in shown.log[len(said) :]


def test_a_process_ends_while_its_driver_hangs(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    with telemetry(driver.environment, tmp_path, bus_id(0), limit_s=0.1) as shown:
        shown.until(lambda series: bool(series))
        driver.set(0, hang=1)
        shown.until(lambda series: not series)
        assert shown.process.stdin is not None
        shown.process.stdin.close()
        assert shown.process.wait(LIMIT_S) == 0


def test_a_lost_gpu_takes_its_own_metrics_away_and_the_log_says_so_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path, gpus=2)
    with telemetry(driver.environment, tmp_path, bus_id(0), bus_id(1)) as shown:
        shown.until(lambda series: {each[1] for each in series} == {"0", "1"})
        driver.set(1, lost=1)
        shown.until(lambda series: {each[1] for each in series} == {"0"})
        driver.set(0, temperature=65)
        shown.until(lambda series: series["headrace_gpu_temperature_celsius", "0", "GPU-0"] == 65.0)
        line = f"WARNING {bus_id(1)}: the GPU's metrics are not shown until it can be read: GPU is lost"
        assert shown.log == [line]
        driver.set(1, lost=None)
        shown.text("restart")  # as after a new engine's start
        shown.until(lambda series: {each[1] for each in series} == {"0", "1"})
        assert shown.log == [line, f"INFO {bus_id(1)}: the GPU's metrics are there again"]


def test_xid_errors_are_counted_and_logged_and_stay_after_the_gpu_is_lost(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    with telemetry(driver.environment, tmp_path, bus_id(0)) as shown:
        shown.until(lambda series: bool(series))
        driver.report_xid(0, 94)
        driver.report_xid(0, 79)
        driver.report_xid(0, 79)
        driver.set(0, lost=1)
        errors = {
            ("headrace_gpu_xid_errors_total", "0", "GPU-0", "94"): 1.0,
            ("headrace_gpu_xid_errors_total", "0", "GPU-0", "79"): 2.0,
        }
        shown.until(lambda series: series == errors)
    assert sorted(line for line in shown.log if "Xid" in line) == [
        *["ERROR GPU 0 (GPU-0): its driver reports Xid 79"] * 2,
        "ERROR GPU 0 (GPU-0): its driver reports Xid 94",
    ]


def test_a_gpu_that_the_driver_does_not_know_is_named_once_and_shows_nothing(tmp_path: Path) -> None:
    with telemetry(Driver(tmp_path).environment, tmp_path, "0000:ff:1f.7") as shown:
        eventually(lambda: bool(shown.log), limit_s=LIMIT_S, what="the log says it")
        assert not shown.series()
        assert shown.log == ["WARNING 0000:ff:1f.7: the GPU's metrics are not shown until it can be read: Not Found"]


def test_an_engine_without_gpus_shows_nothing_logs_nothing_and_has_no_thread(tmp_path: Path) -> None:
    with telemetry(Driver(tmp_path).environment, tmp_path) as shown:
        texts = [shown.text() for _ in range(3)]
        assert not shown.series()
    assert all("nvml" not in text for text in texts)
    assert shown.log == []
