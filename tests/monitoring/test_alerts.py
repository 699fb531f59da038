"""The alerts, by Prometheus's own unit tests: each fires on its fault after its time, and not without it.

tests/integration/test_monitoring.py has each of them fired by a real fault.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.stack import ROOT
from tests.monitoring.prometheus import ALERTS, PROMTOOL, quickened

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
FRONTEND = 'namespace="default", service="frontend", instance="f"'
OK, FAILED = (
    f'headrace_requests_total{{{FRONTEND}, model="m", operation="chat", status="{code}"}}' for code in (200, 503)
)
FIRST, TOKENS = "headrace_time_to_first_token_seconds", "headrace_inter_token_latency_seconds"
UP = 'up{job="headrace", service="router", instance="r"}'
GPU = 'namespace="default", service="worker", instance="x", model="m", gpu="0", uuid="u"'
WORKER, KVBM, ROUTER = (f'namespace="default", service="{name}", instance="x"' for name in ("worker", "kvbm", "router"))


def histogram(name: str, in_time: str, all_: str, bound: str) -> dict[str, str]:
    labels = f'{FRONTEND}, model="m"'
    return {f'{name}_bucket{{{labels}, le="{bound}"}}': in_time, f"{name}_count{{{labels}}}": all_}


CASES: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    # alert: (series of a fault, series without it, when it fires at the latest)
    "HeadraceRequestsFailing": ({OK: "0+98x120", FAILED: "0+2x120"}, {OK: "0+1000x120", FAILED: "0+1x120"}, "70m"),
    "HeadraceRequestsFailingSlowly": ({OK: "0+99x480", FAILED: "0+1x480"}, {OK: "0+1000x480", FAILED: "0+1x480"}, "7h"),
    "HeadraceFirstTokenLate": (
        histogram(FIRST, "0+80x120", "0+100x120", "2.5"),
        histogram(FIRST, "0+99x120", "0+100x120", "2.5"),
        "70m",
    ),
    "HeadraceTokensSlow": (
        histogram(TOKENS, "0+80x120", "0+100x120", "0.25"),
        histogram(TOKENS, "0+99x120", "0+100x120", "0.25"),
        "70m",
    ),
    "HeadraceNoRouter": ({UP: "1x5 0x20"}, {UP: "1x25"}, "10m"),
    "HeadraceNoWorker": (
        {f'headrace_candidates{{{ROUTER}, model="m"}}': "1x5 0x20"},
        {f'headrace_candidates{{{ROUTER}, model="m"}}': "1x25"},
        "10m",
    ),
    "HeadraceTargetDown": ({UP: "1x5 0x20"}, {UP: "1x25"}, "10m"),
    "HeadraceEngineRestarts": (
        {f"headrace_engine_restarts_total{{{WORKER}}}": "0x5 1x20"},
        {f"headrace_engine_restarts_total{{{WORKER}}}": "3x25"},
        "10m",
    ),
    "HeadraceWorkerStandsStill": (
        {f'headrace_workers_standing_still{{{ROUTER}, model="m"}}': "0x5 1x20"},
        {f'headrace_workers_standing_still{{{ROUTER}, model="m"}}': "0x25"},
        "10m",
    ),
    "HeadraceWorkersLeftOut": (
        {f'headrace_workers_left_out{{{ROUTER}, reason="refused"}}': "0x5 2x40"},
        {f'headrace_workers_left_out{{{ROUTER}, reason="refused"}}': "0x5 2x10 0x30"},
        "30m",
    ),
    "HeadraceIndexDiffers": (
        {f'headrace_kv_digests_total{{{ROUTER}, outcome="differed"}}': "0x5 1x20"},
        {f'headrace_kv_digests_total{{{ROUTER}, outcome="agreed"}}': "0+1x25"},
        "10m",
    ),
    "HeadraceFileStale": (
        {f'headrace_stale_files{{{FRONTEND}, file="keys"}}': "0x5 1x20"},
        {f'headrace_stale_files{{{FRONTEND}, file="keys"}}': "0x25"},
        "10m",
    ),
    "HeadraceGpuHot": (
        {f"headrace_gpu_slowdown_margin_celsius{{{GPU}}}": "30x5 5x20"},
        {f"headrace_gpu_slowdown_margin_celsius{{{GPU}}}": "30x5 5x2 6x20"},
        "15m",
    ),
    "HeadraceGpuThrottled": (
        {f'headrace_gpu_throttled{{{GPU}, reason="thermal"}}': "0x5 1x30"},
        {f'headrace_gpu_throttled{{{GPU}, reason="thermal"}}': " ".join("0110" * 7)},
        "25m",
    ),
    "HeadraceGpuErrors": (
        {f'headrace_gpu_xid_errors_total{{{GPU}, xid="79"}}': "_x20 1x5"},
        {
            f'headrace_gpu_xid_errors_total{{{GPU}, xid="79"}}': "1x25",
            f'headrace_gpu_ecc_errors_total{{{GPU}, kind="uncorrected"}}': "2x25",
            f'headrace_gpu_ecc_errors_total{{{GPU}, kind="corrected"}}': "0+1x25",
        },
        "22m",
    ),
    "HeadraceStoreMissing": (
        {f"headrace_kvbm_attached{{{WORKER}}}": "1x5 0x20"},
        {f"headrace_kvbm_attached{{{WORKER}}}": "1x5 0 1x20"},
        "10m",
    ),
    "HeadraceStoreFull": (
        {
            f'headrace_kvbm_store_blocks_total{{{KVBM}, outcome="declined"}}': "0+60x60",
            f'headrace_kvbm_store_blocks_total{{{KVBM}, outcome="granted"}}': "0+40x60",
        },
        {
            f'headrace_kvbm_store_blocks_total{{{KVBM}, outcome="declined"}}': "0+40x60",
            f'headrace_kvbm_store_blocks_total{{{KVBM}, outcome="granted"}}': "0+60x60",
        },
        "30m",
    ),
    "HeadraceDiskErrors": (
        {f'headrace_kvbm_disk_lost_blocks_total{{{KVBM}, operation="read", reason="damaged"}}': "_x20 1x5"},
        {f'headrace_kvbm_disk_lost_blocks_total{{{KVBM}, operation="read", reason="damaged"}}': "1x25"},
        "22m",
    ),
    "HeadraceDiskOff": (
        {f'headrace_kvbm_disks{{{KVBM}, state="off"}}': "0x5 1x20"},
        {f'headrace_kvbm_disks{{{KVBM}, state="off"}}': "0x25"},
        "10m",
    ),
    "HeadraceLeasesLost": (
        {f"headrace_leases_lost_total{{{WORKER}}}": "0x5 1x20"},
        {f"headrace_leases_lost_total{{{WORKER}}}": "1x25"},
        "10m",
    ),
    "HeadraceDiscoveryFails": (
        {f"headrace_discovery_failures_total{{{WORKER}}}": "0+4x20"},
        {f"headrace_discovery_failures_total{{{WORKER}}}": "5x20"},
        "10m",
    ),
    "HeadraceNatsSlowConsumer": (
        {"gnatsd_varz_slow_consumers": "0x5 1x20"},
        {"gnatsd_varz_slow_consumers": "2x25"},
        "10m",
    ),
}


def test_every_alert_has_a_case_a_severity_and_a_place_in_the_documents() -> None:
    document = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    headings = {f"docs/monitoring.md#{title.lower()}" for title in re.findall(r"^#+ (\w+)$", document, re.MULTILINE)}
    assert [rule["alert"] for rule in RULES] == list(CASES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook"] in headings


def test_every_alert_is_fired_by_a_real_fault_as_well() -> None:
    source = (ROOT / "tests" / "integration" / "test_monitoring.py").read_text(encoding="utf-8")
    assert sorted(re.findall(r'"(Headrace\w+)": \{', source)) == sorted(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_on_its_fault_and_not_without_it(alert: str, tmp_path: Path) -> None:
    check(alert, *CASES[alert], tmp_path)


def test_a_lease_lost_while_its_process_stood_still_for_longer_than_the_alert_looks_back(tmp_path: Path) -> None:
    lost = f"headrace_leases_lost_total{{{WORKER}}}"
    check("HeadraceLeasesLost", {lost: "0x5 _x30 1x10"}, {lost: "1x5 _x30 1x10"}, "40m", tmp_path)


def check(alert: str, fault: dict[str, str], without: dict[str, str], when: str, tmp_path: Path) -> None:
    """Have promtool say that the alert fires on the fault's series by then, and not on those without it."""
    assert PROMTOOL is not None
    cases = []
    for series, fires in ((fault, True), (without, False)):
        given = [{"series": name, "values": values} for name, values in series.items()]
        absent = alert != "HeadraceNoRouter" and {"series": UP, "values": "1x600"}
        expected = {"eval_time": when, "alertname": alert, "exp_alerts": []}
        test = {"interval": "1m", "input_series": given + ([absent] if absent and UP not in series else [])}
        # promtool compares all labels and annotations; whether it fires is read from ALERTS.
        count = {
            "eval_time": when,
            "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
            "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
        }
        cases.append(test | {"promql_expr_test": [count]} | ({} if fires else {"alert_rule_test": [expected]}))
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": cases}))
    told = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stdout + told.stderr


def test_shortened_rules_are_rules_still(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    file = tmp_path / "alerts.yml"
    file.write_text(quickened(ALERTS.read_text(), 60))
    assert "[1h]" not in file.read_text()
    assert "[60s]" in file.read_text()
    subprocess.run([PROMTOOL, "check", "rules", str(file)], check=True, capture_output=True, timeout=120)
