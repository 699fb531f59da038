"""What measurements mean for Headrace, and what to set. Pure.

    ok        nothing to do
    warn      it works, but slower or smaller than it could
    bad       something that Headrace needs, or that was asked for, does not work
    skipped   not measured, and not asked for

docs/check.md explains each line; a test holds the page to the names here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from deploy.local.check.measurements import (
    BusMeasured,
    ClockBounds,
    DiscoveryMeasured,
    DiskMeasured,
    GpusMeasured,
    Measurements,
    MemoryMeasured,
    PeerMeasured,
    Unmeasured,
)

State = Literal["ok", "warn", "bad", "skipped"]

SLOW_MESSAGE_S, LATE_MESSAGE_S = 0.002, 0.25
"""A message through NATS, or to a peer and back: slow, and so late that answers are given up (after 1 s, and four may
follow each other)."""
SLOW_CALL_S, LATE_CALL_S = 0.05, 1.0
"""A call of etcd: slow, and so late that a busier moment exceeds the limit of 2 s."""
HEADER_BYTES = 64 << 10
"""The room for headers that the server's limit needs above our own."""
LEAST_PAYLOAD_BYTES = 576 << 10
"""Our own pieces: 512 KiB of a kept response, 256 KiB of a snapshot of a cache, and what is around them."""
TOKEN_BYTES = 4
CLOCKS_APART_S = 0.1
PROMPT_BYTES = 1 << 30
"""The KV of a prompt of 8,192 tokens of an 8B Llama in 16 bit."""
PROMPT_TOKENS = 8192
PEER_WAIT_S = 0.25
"""The default of kvbm's `peers.wait_s`."""
PEER_ANSWER_S, LONGEST_ANSWER_S = 2.0, 4.0
"""The default of workers' `kvbm.timeout_s`, and the most that it may be."""
PEER_SHARE = 0.75
"""The part of `kvbm.timeout_s` for which a Fetch waits at most for other machines."""
LONGEST_PEER_WAIT_S = PEER_SHARE * LONGEST_ANSWER_S
SPARE = 1.1
"""How much longer than the measured time a wait should be."""
COMPUTED_S = 0.28
"""The time in which one H200 computes them."""
SLOW_DISK_BYTES_S, SLOW_ROAD_BYTES_S, SLOW_BUS_BYTES_S = 0.5e9, 1e9, 20e9
SLOW_READ_S = 0.02
LEAST_VALUE_BYTES = 64 << 10
"""The value that is tried; a model's card is smaller."""
MOST_SHOWN = 8
"""Most pairs of GPUs in one line."""
FULLER = 1.3
"""How much faster several streams must be to be worth a remark."""
MEMORY_KINDS = ("tmpfs", "hugetlbfs", "ramfs")
HUGE = ("huge=always", "huge=within_size")
STRICT = 2


class Verdict(Struct, frozen=True):
    """One line of the result."""

    name: str
    state: State
    shown: str
    """What was measured, with its unit, for people."""
    meaning: str
    advice: str = ""
    """What to set. Empty if there is nothing."""
    value: float | None = None
    unit: str = ""


def verdicts(found: Measurements) -> list[Verdict]:
    """Return the verdicts about everything, in the order in which they are shown."""
    all_of_it: list[Verdict] = []
    for part, measured in (
        ("NATS", found.bus),
        ("etcd", found.discovery),
        ("memory", found.memory),
        ("disk", found.disk),
        ("GPU", found.gpus),
        ("peer", found.peer),
    ):
        match measured:
            case Unmeasured(reason=reason, wanted=wanted, advice=advice):
                state: State = "bad" if wanted else "skipped"
                all_of_it.append(Verdict(part, state, "not measured", f"{reason}.", advice))
            case BusMeasured():
                all_of_it += _bus(measured)
            case DiscoveryMeasured():
                all_of_it += _discovery(measured)
            case MemoryMeasured():
                all_of_it += _memory(measured, found.pool_bytes, named=found.pool_named)
            case DiskMeasured():
                all_of_it += _disk(measured, named=found.disk_named)
            case GpusMeasured():
                all_of_it += _gpus(measured)
            case PeerMeasured():
                all_of_it += _peer(measured)
    return all_of_it


def _verdict(
    name: str, state: State, shown: str, meaning: str, advice: str = "", value: float | None = None, unit: str = ""
) -> Verdict:
    """Return a verdict; where all is well, without advice."""
    return Verdict(name, state, shown, meaning, "" if state == "ok" else advice, value, unit)


def _bus(bus: BusMeasured) -> Iterator[Verdict]:
    jetstream = "with JetStream" if bus.jetstream else "no JetStream"
    shown = f"{bus.address}, version {bus.version}, {jetstream}"
    meaning = "Only observe.events_plane = jetstream needs JetStream. These settings cannot be seen from here:"
    advice = 'max_pending: 512MB, ping_interval: "10s", ping_max: 2 in the file of nats-server'
    yield Verdict("NATS server", "ok", shown, meaning, advice)
    yield from _others("NATS servers", bus.down, "nats.url")
    if bus.refused:
        meaning = "Services publish and subscribe below headrace., and are answered below their inbox."
        advice = "nats.user, nats.password, nats.inbox of a user with the rights of `services` in compose's nats.conf"
        yield _verdict("NATS rights", "bad", bus.refused, meaning, advice)
        return
    shown = f"{_time(bus.round_trip_s)}, nine tenths within {_time(bus.slow_trip_s)}"
    meaning = "Some five messages go through NATS before a request's first token, then one for each step."
    advice = "run NATS nearer to the services, on a machine that is not busy"
    yield _trip("NATS round trip", bus.round_trip_s, shown, meaning, advice)
    yield _payload(bus)
    if bus.clock is not None:
        yield _clock("clock of NATS", bus.clock)


def _others(name: str, down: tuple[str, ...], setting: str) -> Iterator[Verdict]:
    """Yield a warning if some servers of a cluster are wrong."""
    if down:
        meaning = "Services use the other servers. When those are away too, nothing is left."
        yield Verdict(name, "warn", "; ".join(down), meaning, f"start these servers, or change {setting}")


def _payload(bus: BusMeasured) -> Verdict:
    limit, ours = bus.max_payload_bytes, bus.payload_limit_bytes
    state: State = "bad"
    advice = "max_payload: 5MB in the file of nats-server"
    if limit < LEAST_PAYLOAD_BYTES:
        meaning = "The services' own messages do not fit: kept responses have pieces of 512 KiB, snapshots 256 KiB."
    elif limit < ours + HEADER_BYTES:
        state = "warn"
        meaning = f"Prompts of more than some {min(ours, limit) // TOKEN_BYTES:,} tokens, and larger bodies of NATS"
        meaning += " clients, are refused. The server counts headers too: a message that is only just too large ends"
        meaning += " the connection of its sender, and all requests on it start again."
        advice += f"; or, to refuse earlier, nats.payload_limit_bytes={limit - HEADER_BYTES} of every service"
    elif not bus.echoed_bytes:
        meaning = f"The server allows {_size(ours)}, but such a message did not come back in time."
        advice = "look for a proxy or a slow link between this machine and NATS"
    else:
        state = "ok"
        meaning = f"{_size(bus.echoed_bytes)} came back in {_time(bus.echo_s)}."
        meaning += f" Prompts of up to some {ours // TOKEN_BYTES:,} tokens fit."
    shown = f"max_payload {_size(limit)}, nats.payload_limit_bytes {_size(ours)}"
    return _verdict("NATS payload", state, shown, meaning, advice, limit, "bytes")


def _discovery(etcd: DiscoveryMeasured) -> Iterator[Verdict]:
    shown = f"{etcd.address}, version {etcd.version or 'unknown'}, {_size(etcd.database_bytes)}"
    meaning = "A process that cannot write here is not found by the others. Keys are few and small."
    if etcd.faults:
        meaning = f"It has raised the alarm {', '.join(etcd.faults)}: processes cannot join."
    advice = "compact and defragment etcd, then `etcdctl alarm disarm`; --auto-compaction-retention"
    yield _verdict("etcd server", "bad" if etcd.faults else "ok", shown, meaning, advice)
    yield from _others("etcd servers", etcd.down, "discovery.endpoints")
    renewing = "Each process renews its lease (10 s) every 2 s, and gives a call up after 2 s. No request waits for it."
    advice = "a faster disk for etcd, or a nearer one; discovery.lease_ttl_s of every service, such as 20"
    reading = "Processes read all keys when they start, and after an outage of etcd."
    for name, took_s, meaning in (("etcd read", etcd.read_s, reading), ("etcd write", etcd.write_s, renewing)):
        state: State = "bad" if took_s >= LATE_CALL_S else "warn" if took_s >= SLOW_CALL_S else "ok"
        yield _verdict(name, state, _time(took_s), meaning, advice, took_s, "s")
    whole = etcd.value_bytes >= LEAST_VALUE_BYTES
    meaning = "A value of 64 KiB is kept whole; the card of a model is smaller."
    if not whole:
        meaning = "A value of 64 KiB did not come back whole: the cards of models may not fit."
    advice = "--max-request-bytes of etcd"
    yield _verdict("etcd value", "ok" if whole else "bad", _size(etcd.value_bytes), meaning, advice)
    if etcd.clock is not None:
        yield _clock("clock of etcd", etcd.clock)


def _memory(memory: MemoryMeasured, pool_bytes: int, *, named: bool) -> Iterator[Verdict]:
    rooms = [(memory.available_bytes, "the memory that is available")]
    if memory.free_bytes is not None:
        rooms.append((memory.free_bytes, f"the room in {memory.directory}"))
    if memory.group_limit_bytes is not None:
        rooms.append((memory.group_limit_bytes, "the limit of this container or control group"))
    room, what = min(rooms)
    state: State = "ok" if room >= pool_bytes else "bad" if named else "warn"
    meaning = f"The block store takes {_size(pool_bytes)} at its start, and the least of all limits is {what}."
    advice = f"--kvbm-bytes {room // 2 >> 20}M; or more memory: docker --shm-size, mount -o remount,size=…"
    yield _verdict("pool room", state, _size(room), meaning, advice, room, "bytes")
    inside = memory.filesystem in MEMORY_KINDS
    meaning = "This is no memory: each block is written to a disk, and GPUs cannot pin it."
    meaning = "Engines and kvbm map the pool here." if inside else meaning
    advice = "--kvbm-pool of a directory on a tmpfs, such as /dev/shm (pool.directory, kvbm.pool)"
    shown = f"{memory.filesystem or 'unknown'} at {memory.directory}"
    yield _verdict("pool file system", "ok" if inside else "warn", shown, meaning, advice)
    huge = memory.filesystem == "hugetlbfs" or any(each in memory.mount_options.split(",") for each in HUGE)
    meaning = "Copies to and from the pool are about a fifth faster with huge pages."
    advice = f"mount -o remount,huge=within_size {memory.directory}, or a tmpfs of its own for the pool"
    yield _verdict("huge pages", "ok" if huge else "warn", "on" if huge else "off", meaning, advice)
    locked = memory.memlock_bytes
    short = locked is not None and locked < pool_bytes and memory.nvidia
    meaning = "There is no NVIDIA driver here, so nothing is pinned."
    if memory.nvidia:
        meaning = "Workers on GPUs pin the pool. NVIDIA's driver 580 ignores this limit; other drivers and RDMA do not."
    advice = "ulimit -l unlimited; LimitMEMLOCK=infinity in systemd; docker run --ulimit memlock=-1"
    shown = "no limit" if locked is None else _size(locked)
    yield _verdict("locked memory", "warn" if short else "ok", shown, meaning, advice)
    yield _overcommit(memory, pool_bytes)


def _overcommit(memory: MemoryMeasured, pool_bytes: int) -> Verdict:
    shown, left = f"vm.overcommit_memory {memory.overcommit}", memory.commit_left_bytes
    if memory.overcommit != STRICT:
        meaning = "Programs may reserve more memory than they use, as engines and CUDA do."
        return _verdict("overcommit", "ok", shown, meaning)
    meaning = "With 2, memory that is reserved and not used counts: engines and CUDA reserve much more than they use."
    state: State = "warn" if left >= 2 * pool_bytes else "bad"
    return _verdict("overcommit", state, f"{shown}, {_size(left)} left", meaning, "sysctl vm.overcommit_memory=0")


def _disk(disk: DiskMeasured, *, named: bool) -> Iterator[Verdict]:
    memory = disk.filesystem in MEMORY_KINDS
    meaning = "There is no O_DIRECT here: the disk tier works through the page cache, which takes memory from others."
    if disk.direct:
        meaning = "kvbm reads and writes past the page cache (O_DIRECT), and leaves 4 GiB (disk.min_free_bytes)."
    if memory:
        meaning = "This is memory, not a disk: blocks here take the place of others."
    shown = f"{disk.filesystem or 'unknown'} at {disk.directory}, {_size(disk.free_bytes)} free"
    advice = "--kvbm-disk of a directory on a local disk with ext4 or XFS"
    yield _verdict("disk", "ok" if disk.direct and not memory else "warn", shown, meaning, advice)
    if not disk.direct:
        return
    unused = "nothing, since no --kvbm-disk was given; for one, a local NVMe disk"
    advice = "a local NVMe disk, or no --kvbm-disk" if named else unused
    for name, rate in (("disk write", disk.write_bytes_s), ("disk read", disk.read_bytes_s)):
        slow = rate < SLOW_DISK_BYTES_S
        meaning = f"8,192 tokens of an 8B model in 16 bit are 1 GiB of KV: {_time(PROMPT_BYTES / rate)}."
        meaning += " A GPU computes them sooner: it pays for slow engines only." if slow else ""
        yield _verdict(name, "warn" if slow else "ok", _rate(rate), meaning, advice, rate, "bytes/s")
    meaning = "One request of 2 MiB, alone. A fetch from disk waits at least so long."
    advice = "a local NVMe disk, or one that others use less" if named else unused
    slow = disk.read_s > SLOW_READ_S
    yield _verdict("disk wait", "warn" if slow else "ok", _time(disk.read_s), meaning, advice, disk.read_s, "s")


def _gpus(found: GpusMeasured) -> Iterator[Verdict]:
    for gpu in found.gpus:
        rate = min(gpu.to_device_bytes_s, gpu.from_device_bytes_s)
        shown = f"{gpu.name}: {_rate(gpu.to_device_bytes_s)} to it, {_rate(gpu.from_device_bytes_s)} from it"
        meaning = f"1 GiB of KV takes {_time(PROMPT_BYTES / rate)} from the pool. PCIe 4 has some 25 GB/s, PCIe 5 55."
        advice = "look at the link's width and generation in `nvidia-smi -q`; another slot"
        state: State = "warn" if rate < SLOW_BUS_BYTES_S else "ok"
        yield _verdict(f"GPU {gpu.index} bus", state, shown, meaning, advice, rate, "bytes/s")
    if len(found.gpus) > 1:
        pairs = ((a, b) for a in found.gpus for b in found.gpus if a is not b)
        apart = [f"{a.index}-{b.index}" for a, b in pairs if b.index not in a.peers]
        rate = min((gpu.peer_bytes_s for gpu in found.gpus if gpu.peer_bytes_s), default=0.0)
        shown = f"not from-to {', '.join(apart[:MOST_SHOWN])}" if apart else f"all {len(found.gpus)} reach each other"
        shown += f", at {_rate(rate)}" if rate else ""
        meaning = "GPUs can read each other's memory, over NVLink or PCIe."
        meaning = "Blocks between these GPUs go through the machine's memory." if apart else meaning
        advice = "GPUs of one root complex or NVLink; IOMMU and ACS off in a machine without VMs"
        yield _verdict(
            "GPU peers", "warn" if apart else "ok", shown, meaning, advice, rate or None, "bytes/s" if rate else ""
        )
    pinned = found.pool_pinned
    meaning = "Copies between a GPU and memory that is not pinned are four to six times slower."
    advice = "a tmpfs for the pool (--kvbm-pool /dev/shm), ulimit -l unlimited"
    shown = "the pool's directory can be pinned" if pinned else f"refused: {found.pool_refusal}"
    yield _verdict("GPU pinning", "ok" if pinned else "warn", shown, meaning, advice)


def _peer(peer: PeerMeasured) -> Iterator[Verdict]:
    shown = f"{_time(peer.round_trip_s)} to {peer.address}, version {peer.version}"
    meaning = "Each question from one machine's block store to the other's takes at least so long."
    advice = "machines of one network, without a VPN or proxy between"
    yield _trip("peer round trip", peer.round_trip_s, shown, meaning, advice)
    if peer.clock is not None:
        yield _clock("clock of the peer", peer.clock)
    for outward, name in ((True, "rate to the peer"), (False, "rate from the peer")):
        rates = {each.streams: each.bytes_s for each in peer.rates if each.outward is outward}
        if not rates:
            continue
        best = max(rates.values())
        meaning, advice = _within_wait(best, peer.round_trip_s)
        meaning += f" An H200 computes it in {_time(COMPUTED_S)}, slower engines later."
        meaning += " One stream does not fill this road." if best > FULLER * rates[1] else ""
        shown = ", ".join(f"{_rate(rate)} with {count} stream{'s' * (count > 1)}" for count, rate in rates.items())
        if best < SLOW_ROAD_BYTES_S:
            network = "a network of 10 Gbit/s or more; MTU 9000; net.ipv4.tcp_rmem and tcp_wmem up to 16 MiB"
            advice = f"{network}; {advice}"
        yield _verdict(name, "warn" if advice else "ok", shown, meaning, advice, best, "bytes/s")
    if peer.fault:
        meaning = f"The transfer did not end: {peer.fault}."
        yield _verdict("peer transfer", "bad", "stopped in the middle", meaning, "look for a firewall or a lossy link")
    for road in peer.roads:
        meaning = "TCP between the machines; its rates are those above." if road.there else f"{road.reason}."
        shown = "there" if road.there else "not there"
        yield _verdict(f"road {road.name}", "ok" if road.there else "skipped", shown, meaning)


def _within_wait(bytes_s: float, round_trip_s: float) -> tuple[str, str]:
    """Return how much of a prompt is read from another machine while a Fetch waits, and which settings make that 1 GiB;
    without the latter where it is as much."""
    whole_s = PROMPT_BYTES / bytes_s
    meaning = f"1 GiB of KV, 8,192 tokens of an 8B model, takes {_time(whole_s)}."
    arriving_bytes = max(0.0, PEER_WAIT_S - round_trip_s) * bytes_s
    if arriving_bytes >= PROMPT_BYTES:
        return meaning, ""
    tokens = int(arriving_bytes / PROMPT_BYTES * PROMPT_TOKENS)
    meaning += f" A Fetch waits {PEER_WAIT_S:g} s (peers.wait_s), in which {_size(arriving_bytes)} or {tokens:,} such"
    meaning += " tokens arrive; the rest of a longer prompt is computed."
    needed_s = math.ceil(20 * SPARE * (whole_s + round_trip_s)) / 20
    wait_s = min(needed_s, LONGEST_PEER_WAIT_S)
    advice = f"peers.wait_s={wait_s:g} of kvbm"
    if wait_s > PEER_ANSWER_S * PEER_SHARE:
        advice += f" and kvbm.timeout_s={math.ceil(10 * wait_s / PEER_SHARE) / 10:g} of workers"
    if wait_s < needed_s:
        advice += f", the most: {_size(bytes_s * (wait_s / SPARE))} arrive then"
    return meaning, advice


def _trip(name: str, took_s: float, shown: str, meaning: str, advice: str) -> Verdict:
    state: State = "bad" if took_s >= LATE_MESSAGE_S else "warn" if took_s >= SLOW_MESSAGE_S else "ok"
    return _verdict(name, state, shown, meaning, advice, took_s, "s")


def _clock(name: str, bounds: ClockBounds) -> Verdict:
    middle, half = (bounds.least_s + bounds.most_s) / 2, (bounds.most_s - bounds.least_s) / 2
    apart = max(bounds.least_s, -bounds.most_s, 0.0) > CLOCKS_APART_S
    shown = f"{'-' if middle < 0 else '+'}{_time(abs(middle))}, give or take {_time(half)}"
    meaning = "No request depends on clocks: limits travel as the time left. Spans, log lines and certificates do."
    advice = "chrony or systemd-timesyncd on both machines"
    return _verdict(name, "warn" if apart else "ok", shown, meaning, advice, middle, "s")


def _time(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(size_bytes) < 1023.5:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.3g} GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.3g} MB/s"
