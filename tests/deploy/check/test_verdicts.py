"""deploy/local/check/verdicts.py: what each measurement means."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from deploy.local.check.measurements import ClockBounds, GpuMeasured, GpusMeasured, Measurements, Rate, Unmeasured
from deploy.local.check.verdicts import (
    LONGEST_ANSWER_S,
    LONGEST_PEER_WAIT_S,
    PEER_ANSWER_S,
    PEER_SHARE,
    PEER_WAIT_S,
    Verdict,
    verdicts,
)
from services.kvbm.config import PeersConfig
from services.kvbm.peers.cache import REPLY_SHARE
from services.worker.config import KVConnectorConfig
from tests.deploy.check.measured import GPUS, WELL


def judged(found: Measurements) -> dict[str, Verdict]:
    listed = verdicts(found)
    named = {each.name: each for each in listed}
    assert len(named) == len(listed), "each name is there once"
    return named


def test_where_all_is_well_only_absent_roads_are_not_ok() -> None:
    states = {name: each.state for name, each in judged(WELL).items()}
    assert {name: state for name, state in states.items() if state != "ok"} == {
        "road CUDA IPC": "skipped",
        "road NIXL": "skipped",
    }
    assert len(states) == 29


def test_every_verdict_says_what_it_means_and_one_that_is_not_well_what_to_set() -> None:
    found = [*verdicts(WELL), *(each for part, changes, *_ in CASES for each in verdicts(changed(part, changes)))]
    for each in found:
        assert each.shown, each
        assert each.meaning.endswith((".", ":")), each
        assert bool(each.advice) == (each.state in ("warn", "bad")) or each.name == "NATS server", each


def changed(part: str, changes: dict[str, Any]) -> Measurements:
    if part == "all":
        return replace(WELL, **changes)
    return replace(WELL, **{part: replace(getattr(WELL, part), **changes)})


CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("bus", {"round_trip_s": 0.00199}, "NATS round trip", "ok", "1.99 ms"),
    ("bus", {"round_trip_s": 0.002}, "NATS round trip", "warn", "2 ms"),
    ("bus", {"round_trip_s": 0.25}, "NATS round trip", "bad", "250 ms"),
    ("bus", {"refused": "permissions violation"}, "NATS rights", "bad", "permissions"),
    ("bus", {"max_payload_bytes": (4 << 20) + (64 << 10)}, "NATS payload", "ok", "4.062 MiB"),
    ("bus", {"max_payload_bytes": (4 << 20) + (64 << 10) - 1}, "NATS payload", "warn", "4 MiB"),
    ("bus", {"max_payload_bytes": 1 << 20}, "NATS payload", "warn", "max_payload 1 MiB"),
    ("bus", {"max_payload_bytes": (576 << 10) - 1}, "NATS payload", "bad", "576 KiB"),
    ("bus", {"echoed_bytes": 0}, "NATS payload", "bad", "max_payload"),
    ("bus", {"payload_limit_bytes": 900_000, "max_payload_bytes": 1 << 20}, "NATS payload", "ok", "878.9 KiB"),
    ("bus", {"clock": ClockBounds(0.05, 0.2)}, "clock of NATS", "ok", "+125 ms"),
    ("bus", {"clock": ClockBounds(-0.3, -0.2)}, "clock of NATS", "warn", "-250 ms, give or take 50 ms"),
    ("bus", {"clock": ClockBounds(2.0, 2.5)}, "clock of NATS", "warn", "+2.25 s"),
    ("bus", {"down": ("nats://b:4222: refused",)}, "NATS servers", "warn", "nats://b:4222: refused"),
    ("discovery", {"down": ("b:2379: refused",)}, "etcd servers", "warn", "b:2379: refused"),
    ("discovery", {"read_s": 0.05}, "etcd read", "warn", "50 ms"),
    ("discovery", {"write_s": 0.0499}, "etcd write", "ok", "49.9 ms"),
    ("discovery", {"write_s": 1.0}, "etcd write", "bad", "1 s"),
    ("discovery", {"faults": ("NOSPACE",)}, "etcd server", "bad", "3.5.9"),
    ("discovery", {"value_bytes": 0}, "etcd value", "bad", "0 B"),
    ("memory", {"free_bytes": (1 << 30) - 1}, "pool room", "warn", "1 GiB"),
    ("memory", {"free_bytes": None}, "pool room", "ok", "40 GiB"),
    ("memory", {"group_limit_bytes": 512 << 20}, "pool room", "warn", "512 MiB"),
    ("all", {"pool_bytes": 25 << 30}, "pool room", "warn", "24 GiB"),
    ("all", {"pool_bytes": 25 << 30, "pool_named": True}, "pool room", "bad", "24 GiB"),
    ("all", {"pool_bytes": 24 << 30, "pool_named": True}, "pool room", "ok", "24 GiB"),
    ("memory", {"filesystem": "ext4"}, "pool file system", "warn", "ext4 at /dev/shm"),
    ("memory", {"mount_options": "rw,huge=never"}, "huge pages", "warn", "off"),
    ("memory", {"mount_options": "rw,huge=advise"}, "huge pages", "warn", "off"),
    ("memory", {"mount_options": "rw,huge=always"}, "huge pages", "ok", "on"),
    ("memory", {"filesystem": "hugetlbfs", "mount_options": "rw"}, "huge pages", "ok", "on"),
    ("memory", {"memlock_bytes": 8 << 20}, "locked memory", "warn", "8 MiB"),
    ("memory", {"memlock_bytes": 8 << 20, "nvidia": False}, "locked memory", "ok", "8 MiB"),
    ("memory", {"memlock_bytes": 1 << 30}, "locked memory", "ok", "1 GiB"),
    ("memory", {"overcommit": 2}, "overcommit", "warn", "8 GiB left"),
    ("memory", {"overcommit": 2, "commit_left_bytes": 1 << 30}, "overcommit", "bad", "1 GiB left"),
    ("memory", {"overcommit": 1}, "overcommit", "ok", "vm.overcommit_memory 1"),
    ("disk", {"direct": False}, "disk", "warn", "xfs at /blocks, 900 GiB free"),
    ("disk", {"filesystem": "tmpfs"}, "disk", "warn", "tmpfs"),
    ("disk", {"write_bytes_s": 0.4e9}, "disk write", "warn", "400 MB/s"),
    ("disk", {"read_bytes_s": 0.5e9}, "disk read", "ok", "500 MB/s"),
    ("disk", {"read_s": 0.05}, "disk wait", "warn", "50 ms"),
    ("gpus", {"gpus": (GpuMeasured(3, "L4", 12e9, 25e9),)}, "GPU 3 bus", "warn", "L4: 12 GB/s to it, 25 GB/s from it"),
    ("gpus", {"pool_pinned": False, "pool_refusal": "not permitted"}, "GPU pinning", "warn", "refused: not permitted"),
    ("peer", {"round_trip_s": 0.03}, "peer round trip", "warn", "30 ms to peer:8770, version 0.1.0"),
    (
        "peer",
        {"rates": (Rate(True, 1, 0.11e9), Rate(False, 1, 2e9))},
        "rate to the peer",
        "warn",
        "110 MB/s with 1 str",
    ),
    (
        "peer",
        {"rates": (Rate(False, 1, 0.9e9), Rate(False, 4, 1e9))},
        "rate from the peer",
        "warn",
        "1 GB/s with 4 streams",
    ),
    ("peer", {"fault": "timed out"}, "peer transfer", "bad", "stopped in the middle"),
]


@pytest.mark.parametrize(("part", "changes", "name", "state", "shown"), CASES)
def test_each_measurement_has_its_verdict(
    part: str, changes: dict[str, Any], name: str, state: str, shown: str
) -> None:
    verdict = judged(changed(part, changes))[name]
    assert (verdict.state, shown in verdict.shown) == (state, True), verdict


def test_the_default_limit_of_nats_says_which_prompts_are_refused_and_both_settings() -> None:
    verdict = judged(changed("bus", {"max_payload_bytes": 1 << 20}))["NATS payload"]
    assert "262,144 tokens" in verdict.meaning
    assert "max_payload: 5MB" in verdict.advice
    assert f"nats.payload_limit_bytes={(1 << 20) - (64 << 10)} " in verdict.advice


def test_a_user_without_rights_has_no_verdict_on_round_trips() -> None:
    found = judged(changed("bus", {"refused": "permissions violation for publish", "round_trip_s": 0.0}))
    assert not {"NATS round trip", "NATS payload"} & found.keys()


def test_gpus_that_do_not_reach_each_other_are_listed() -> None:
    alone = GpusMeasured(tuple(GpuMeasured(each, "L4", 25e9, 25e9) for each in range(16)), True)
    verdict = judged(replace(WELL, gpus=alone))["GPU peers"]
    assert verdict.shown.startswith("not from-to 0-1, 0-2, ")
    assert len(verdict.shown) < 80


def test_the_rate_between_gpus_is_that_of_the_slowest() -> None:
    assert judged(WELL)["GPU peers"].shown == "all 2 reach each other, at 396 GB/s"


def test_one_gpu_has_no_peers_to_reach() -> None:
    assert "GPU peers" not in judged(replace(WELL, gpus=replace(GPUS, gpus=GPUS.gpus[:1])))


def test_several_streams_that_are_much_faster_are_remarked() -> None:
    found = judged(WELL)
    assert "One stream does not fill this road" in found["rate to the peer"].meaning
    assert "One stream" not in found["rate from the peer"].meaning


@pytest.mark.parametrize("part", ["bus", "discovery", "memory", "disk", "gpus", "peer"])
def test_a_part_that_was_not_measured_is_bad_only_if_it_was_wanted(part: str) -> None:
    names = {"bus": "NATS", "discovery": "etcd", "memory": "memory", "disk": "disk", "gpus": "GPU", "peer": "peer"}
    name = names[part]
    for wanted, state in ((False, "skipped"), (True, "bad")):
        verdict = judged(replace(WELL, **{part: Unmeasured("No reason", wanted, "do this")}))[name]
        assert (verdict.state, verdict.meaning, verdict.advice) == (state, "No reason.", "do this")


def rate_verdict(bytes_s: float, round_trip_s: float = 0.0) -> Verdict:
    return judged(changed("peer", {"rates": (Rate(False, 1, bytes_s),), "round_trip_s": round_trip_s}))[
        "rate from the peer"
    ]


def test_a_rate_says_which_prompt_arrives_while_a_fetch_waits_and_the_wait_for_one_of_a_gib() -> None:
    gib = float(1 << 30)
    verdict = rate_verdict(gib, 0.05)
    assert "0.25 s (peers.wait_s), in which 204.8 MiB or 1,638 such tokens arrive" in verdict.meaning
    assert verdict.advice == "peers.wait_s=1.2 of kvbm"
    assert rate_verdict(gib / 2).advice.endswith("; peers.wait_s=2.2 of kvbm and kvbm.timeout_s=3 of workers")
    most = "peers.wait_s=3 of kvbm and kvbm.timeout_s=4 of workers, the most: 279.3 MiB arrive then"
    assert rate_verdict(gib / 10).advice.endswith(most)
    enough = rate_verdict(4 * gib)
    assert (enough.state, enough.advice) == ("ok", "")
    assert "arrive" not in enough.meaning


def test_the_waits_are_those_of_the_services() -> None:
    assert PeersConfig().wait_s == PEER_WAIT_S
    assert KVConnectorConfig().timeout_s == PEER_ANSWER_S
    assert REPLY_SHARE == PEER_SHARE
    msgspec.convert({"wait_s": LONGEST_PEER_WAIT_S}, PeersConfig)
    msgspec.convert({"timeout_s": LONGEST_ANSWER_S}, KVConnectorConfig)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"timeout_s": LONGEST_ANSWER_S + 0.1}, KVConnectorConfig)


def test_a_slow_disk_that_no_flag_named_needs_nothing() -> None:
    slow = changed("disk", {"write_bytes_s": 1e8, "read_bytes_s": 1e8, "read_s": 0.05})
    for name in ("disk write", "disk read", "disk wait"):
        assert judged(slow)[name].advice.startswith("nothing, since no --kvbm-disk was given")
        assert judged(replace(slow, disk_named=True))[name].advice.startswith("a local NVMe disk, or ")


def test_values_have_a_unit_for_programs() -> None:
    for each in verdicts(WELL):
        assert (each.value is None) == (each.unit == ""), each
    found = judged(WELL)
    assert (found["NATS payload"].value, found["NATS payload"].unit) == (5_000_000, "bytes")
    assert (found["disk read"].value, found["disk read"].unit) == (3.8e9, "bytes/s")
