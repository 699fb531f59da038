"""Measurements of a machine where all is well, for tests to change."""

from __future__ import annotations

from deploy.local.check.measurements import (
    BusMeasured,
    ClockBounds,
    DiscoveryMeasured,
    DiskMeasured,
    GpuMeasured,
    GpusMeasured,
    Measurements,
    MemoryMeasured,
    PeerMeasured,
    Rate,
    Road,
)

CLOCK = ClockBounds(-0.001, 0.002)
BUS = BusMeasured("nats://n:4222", "2.11.0", 0.0002, 0.0003, 5_000_000, 4 << 20, 4 << 20, 0.03, False, "", CLOCK)
DISCOVERY = DiscoveryMeasured("e:2379", "3.5.9", 0.001, 0.004, 64 << 10, 1 << 20, (), CLOCK)
MEMORY = MemoryMeasured(
    directory="/dev/shm",
    filesystem="tmpfs",
    mount_options="rw,size=24731708k,huge=within_size",
    free_bytes=24 << 30,
    total_bytes=48 << 30,
    available_bytes=40 << 30,
    group_limit_bytes=None,
    memlock_bytes=None,
    overcommit=0,
    commit_left_bytes=8 << 30,
    nvidia=True,
)
DISK = DiskMeasured("/blocks", "xfs", 900 << 30, True, 1 << 30, 3.6e9, 3.8e9, 0.001)
GPUS = GpusMeasured(
    (
        GpuMeasured(0, "NVIDIA H200", 55.4e9, 55.3e9, (1,), 397e9),
        GpuMeasured(1, "NVIDIA H200", 55.4e9, 55.3e9, (0,), 396e9),
    ),
    True,
)
ROADS = (Road("sockets", True), Road("CUDA IPC", False, "two machines"), Road("NIXL", False, "not installed"))
RATES = (Rate(True, 1, 2.2e9), Rate(True, 4, 5.5e9), Rate(False, 1, 4.4e9), Rate(False, 4, 4.8e9))
PEER = PeerMeasured("peer:8770", "0.1.0", 0.0002, CLOCK, RATES, ROADS)
WELL = Measurements(BUS, DISCOVERY, MEMORY, DISK, GPUS, PEER, 1 << 30)
