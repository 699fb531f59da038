"""Measures an etcd server: reads, writes under a lease, the size of a value, alarms, the clock."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any

import grpc.aio
from msgspec.structs import replace

from deploy.local.check.measurements import ClockSample, DiscoveryMeasured, Unmeasured, clock_bounds, first_of
from shared import subjects
from shared.config import DiscoveryConfig
from shared.discovery.etcd_access import read_credentials
from shared.discovery.etcd_client import EtcdClient, EtcdConnection, rpc
from shared.errors import DiscoveryDown

LIMIT_S = 5.0
READS, WRITES = 20, 10
VALUE_BYTES = 64 << 10
"""The size of the largest value that is tried. Ours are smaller: a model card has a chat template of at most 32 KiB."""
LEASE_S = 10
KEY = f"/{subjects.ROOT}/!check/"
"""The prefix of our key. No namespace has that name, so that no process watches it."""
CLOCK_S, CLOCK_PAUSE_S, CLOCK_LIMIT_S = 1.1, 0.05, 2.0
"""etcd says the time in whole seconds: asked for a little more than one, it shows when a second begins."""
HEAD_LIMIT_BYTES = 1 << 16
UNANSWERED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
"""Refusals of questions about the server itself, which then stay open."""
ALL_ALARMS = 0
"""The action of an AlarmRequest that lists alarms."""

REACH = "start etcd, or give its address: --etcd, discovery.endpoints of every service"
_USER = (
    "set discovery.user and discovery.password (HEADRACE_DISCOVERY_USER, HEADRACE_DISCOVERY_PASSWORD); the user needs"
    f" all keys below /{subjects.ROOT}/"
)
ADVICE = {
    "authenticat": _USER,
    "permission": _USER,
    "user name": _USER,
    "space exceeded": "compact and defragment etcd, then `etcdctl alarm disarm`; or raise its --quota-backend-bytes",
}
"""A part of etcd's error → what to do."""


def measure(config: DiscoveryConfig) -> DiscoveryMeasured | Unmeasured:
    """Return what was measured of the first server that answers, within LIMIT_S, and what is wrong with the others.
    Raise ConfigError."""
    logging.getLogger("shared.discovery").setLevel(logging.CRITICAL)
    return first_of([asyncio.run(_measure(config, endpoint)) for endpoint in config.endpoints])


async def _measure(config: DiscoveryConfig, endpoint: str) -> DiscoveryMeasured | Unmeasured:
    client = EtcdClient(replace(config, endpoints=(endpoint,)), lambda: None)
    try:
        async with asyncio.timeout(LIMIT_S):
            found = await client.call(lambda etcd: _ask(etcd, endpoint))
            asks = not endpoint.startswith("unix:") and read_credentials(config, endpoint) is None
            samples = await _clock(endpoint) if asks else []
    except (DiscoveryDown, TimeoutError) as wrong:
        said = str(wrong) or f"etcd at {endpoint}: no answer within {LIMIT_S:g} s"
        advice = next((what for word, what in ADVICE.items() if word in said.lower()), REACH)
        return Unmeasured(said, wanted=True, advice=advice)
    finally:
        await client.close()
    return DiscoveryMeasured(**found, clock=clock_bounds(samples))


async def _ask(etcd: EtcdConnection, endpoint: str) -> dict[str, Any]:
    """Return the fields that one connection can find out. The key goes at the end, or with its lease."""
    key = (KEY + secrets.token_hex(8)).encode()
    reads = [await _timed(lambda: etcd.ask(etcd.kv.Range, rpc.RangeRequest(key=key))) for _ in range(READS)]
    lease = (await etcd.ask(etcd.lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=LEASE_S))).ID
    try:
        put = rpc.PutRequest(key=key, value=bytes(256), lease=lease)
        writes = [await _timed(lambda: etcd.ask(etcd.kv.Put, put)) for _ in range(WRITES)]
        await etcd.ask(etcd.kv.Put, rpc.PutRequest(key=key, value=bytes(VALUE_BYTES), lease=lease))
        kept = (await etcd.ask(etcd.kv.Range, rpc.RangeRequest(key=key))).kvs
    finally:
        await etcd.ask(etcd.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease))
    version, size_bytes, faults = "", 0, list[str]()
    try:
        status = await etcd.ask(etcd.maintenance.Status, rpc.StatusRequest())
        version, size_bytes = status.version, status.dbSize
        alarms = (await etcd.ask(etcd.maintenance.Alarm, rpc.AlarmRequest(action=ALL_ALARMS))).alarms
        faults = [rpc.AlarmType.Name(each.alarm) for each in alarms]
    except grpc.aio.AioRpcError as wrong:
        if wrong.code() not in UNANSWERED:
            raise
    return {
        "address": endpoint,
        "version": version,
        "read_s": median(reads),
        "write_s": median(writes),
        "value_bytes": len(kept[0].value) if kept else 0,
        "database_bytes": size_bytes,
        "faults": tuple(faults),
    }


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


async def _clock(endpoint: str) -> list[ClockSample]:
    """Return what etcd's HTTP says of the time; empty if it says nothing."""
    host, _, port = endpoint.rpartition(":")
    samples, until_s = list[ClockSample](), time.monotonic() + CLOCK_S
    try:
        async with asyncio.timeout(CLOCK_LIMIT_S):
            while time.monotonic() < until_s:
                samples.append(await _date(host.strip("[]"), int(port)))
                await asyncio.sleep(CLOCK_PAUSE_S)
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return samples
    return samples


async def _date(host: str, port: int) -> ClockSample:
    reader, writer = await asyncio.open_connection(host, port, limit=HEAD_LIMIT_BYTES)
    try:
        asked_s = time.time()
        writer.write(b"GET /version HTTP/1.0\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        answered_s = time.time()
    finally:
        writer.close()
    [date] = [line.partition(":")[2].strip() for line in head if line.lower().startswith("date:")]
    return ClockSample(asked_s, answered_s, parsedate_to_datetime(date).timestamp(), 1.0)
