"""`headrace log`: changes the log level of processes that run."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence

from deploy.local.show.fleet import (
    ANSWER_LIMIT_S,
    FleetConfig,
    by_prefix,
    connect_bus,
    discovery_entries,
    readable_entries,
)
from shared import subjects
from shared.bus.nats_bus import NatsBus
from shared.errors import ConfigError, ProtocolError, Unavailable
from shared.messages.cards import Instance
from shared.messages.control import CONTROL, LOG_LEVEL_CHANGED, ChangeLogLevel


def change_level(config: FleetConfig, level: str, prefixes: Sequence[str], *, for_s: float) -> int:
    """Have processes log from a level on, and print a line of each; return 1 if any did not. `prefixes` are the
    beginnings of their ids; without one, all are asked. Raise ConfigError and Unavailable."""
    logging.basicConfig(level=logging.CRITICAL)  # silence the log of retry loops
    if not 0 <= for_s <= 86_400:
        raise ConfigError("--for-s is 0 to 86400")
    return asyncio.run(_change_level(config, ChangeLogLevel(level, for_s), prefixes))


async def _change_level(config: FleetConfig, asked: ChangeLogLevel, prefixes: Sequence[str]) -> int:
    meant = choose_processes(config.namespace, await discovery_entries(config), prefixes)
    async with connect_bus(config, "headrace log") as bus:
        done = await asyncio.gather(*(_ask_level(bus, config.namespace, one, asked) for one in meant))
    return 0 if all(done) else 1


async def _ask_level(bus: NatsBus, namespace: str, one: Instance, asked: ChangeLogLevel) -> bool:
    subject = subjects.control(namespace, one.service, one.instance)
    try:
        answer = await bus.request(subject, CONTROL.encode(asked), timeout_s=ANSWER_LIMIT_S)
        failed = LOG_LEVEL_CHANGED.decode(answer.payload, answer.headers).failed
    except (Unavailable, ProtocolError) as wrong:
        failed = f"{wrong}; a process of an earlier version does not know it"
    if failed:
        print(f"error: {one.service} {one.instance}: {failed}", file=sys.stderr)
        return False
    until = f" for {asked.for_s:g} s" if asked.for_s else ""
    print(f"{one.service} {one.instance} logs from level {asked.level} on{until}")
    return True


def choose_processes(namespace: str, values: Mapping[str, bytes], prefixes: Sequence[str]) -> list[Instance]:
    """Return the processes that are meant, at least one. `values` are discovery's keys and values. Raise
    ConfigError."""
    there = {one.instance: one for one in readable_entries(namespace, values) if isinstance(one, Instance)}
    if not there:
        raise ConfigError("no process is registered")
    meant = {by_prefix(prefix, sorted(there), "process") for prefix in prefixes} or there.keys()
    return sorted((there[name] for name in meant), key=lambda one: (one.service, one.instance))
