"""`headrace check`: measures one part after the other, and prints what each result means.

One part at a time, so that none disturbs another. Each has its own time limit; together they stay below a minute.
Those of this machine come first: they start processes, which gRPC does not like.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from deploy.local.check import bus, discovery, peer
from deploy.local.check.child import Part, ask
from deploy.local.check.measurements import (
    DiskMeasured,
    GpusMeasured,
    Measurements,
    MemoryMeasured,
    PeerMeasured,
    Unmeasured,
)
from deploy.local.check.verdicts import State, Verdict, verdicts
from deploy.local.check.wire import Address
from deploy.local.show.fleet import FleetConfig
from deploy.local.terminal import Style, paint
from shared.bus.nats_access import check_settings
from shared.discovery.backends import check_settings as check_discovery
from shared.errors import HeadraceError
from shared.version import VERSION

T = TypeVar("T", bound=Struct)
_STYLES: dict[str, Style] = {"ok": "green", "warn": "yellow", "bad": "red", "skipped": "dim"}
_STATE = re.compile(r"^(?:ok|warn|bad|skipped)(?= )", re.MULTILINE)
LEAST_COLUMNS, MOST_COLUMNS = 40, 120
STATES: tuple[State, ...] = ("ok", "warn", "bad", "skipped")
_INDENT = " " * 9
_TEXT_LIMIT = 600
"""Characters of one text at most: servers and peers choose some of them."""


class CheckOptions(Struct, frozen=True, kw_only=True):
    """What one run measures."""

    fleet: FleetConfig
    nats: bool
    """Whether NATS was named, or runs here; else it is skipped."""
    etcd: bool
    pool: Path
    pool_bytes: int
    pool_named: bool
    disk: Path
    disk_named: bool
    peer: Address | None


class CheckReport(Struct, frozen=True):
    """The result as JSON."""

    version: str
    summary: str
    verdicts: list[Verdict]
    measurements: Measurements


def check(options: CheckOptions, *, as_json: bool) -> int:
    """Measure and print. Return 1 if something is bad, else 0. Raise ConfigError, before anything is measured."""
    if options.nats:
        check_settings(options.fleet.nats)
    if options.etcd:
        check_discovery(options.fleet.discovery)
    found = _measure(options)
    judged = verdicts(found)
    if as_json:
        report = CheckReport(VERSION, counted(judged), judged, found)
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        text = render(judged, shutil.get_terminal_size().columns)
        print(_STATE.sub(lambda word: paint(word[0], _STYLES[word[0]], sys.stdout), text))
    return int(any(each.state == "bad" for each in judged))


def _measure(options: CheckOptions) -> Measurements:
    fleet, say = options.fleet, _say
    say("memory")
    memory = _here("memory", options.pool, MemoryMeasured)
    say("disk")
    disk = _here("disk", options.disk, DiskMeasured)
    if isinstance(disk, Unmeasured) and options.disk_named:
        disk = msgspec.structs.replace(disk, wanted=True)
    say("GPUs")
    gpus = _here("gpus", options.pool, GpusMeasured)
    say("NATS")
    nats = _tried(lambda: bus.measure(fleet.nats, fleet.namespace)) if options.nats else Unmeasured(NO_NATS)
    say("etcd")
    etcd = _tried(lambda: discovery.measure(fleet.discovery)) if options.etcd else Unmeasured(_no_etcd(fleet))
    say("peer")
    address = options.peer
    other: PeerMeasured | Unmeasured = Unmeasured(NO_PEER) if address is None else _tried(lambda: peer.measure(address))
    say("")
    planned = options.pool_bytes, options.pool_named, options.disk_named
    return Measurements(nats, etcd, memory, disk, gpus, other, *planned)


NO_NATS = "No NATS server was named and no `up` runs here: --nats nats://HOST:4222"
NO_PEER = "No other machine was named: run `headrace check --serve` there, and give --peer HOST:PORT here"


def _no_etcd(fleet: FleetConfig) -> str:
    if fleet.discovery.backend != "etcd":
        return f"Discovery is in {fleet.discovery_shown}"
    return "No etcd server was named and no `up` runs here: --etcd HOST:2379"


def _tried(measure: Callable[[], T | Unmeasured]) -> T | Unmeasured:
    """Return what was measured; an error that the probe does not know spoils this part alone."""
    try:
        return measure()
    except (HeadraceError, OSError, ValueError, RuntimeError) as wrong:
        return Unmeasured(f"{type(wrong).__name__}: {wrong}", wanted=True)


def _here(part: Part, directory: Path, kind: type[T]) -> T | Unmeasured:
    """Return what a process of its own measured."""
    measured = _tried(lambda: ask(part, directory))
    if isinstance(measured, kind | Unmeasured):
        return measured
    raise AssertionError(measured)


def _say(part: str) -> None:
    """Show on a terminal what is measured now, in one line that is replaced. Empty if nothing more is."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{plain(f'measures {part} …') if part else ''}")
        sys.stderr.flush()


def render(verdicts: Sequence[Verdict], columns: int) -> str:
    """Return all verdicts with what they mean and what to set, and how many there are of each state."""
    columns = min(max(columns, LEAST_COLUMNS), MOST_COLUMNS)
    lines: list[str] = []
    for each in verdicts:
        lines += _wrapped(f"{each.state:<9}{each.name}: {each.shown}", columns, "")
        lines += _wrapped(each.meaning, columns, _INDENT)
        if each.advice:
            lines += _wrapped(f"set: {each.advice}", columns, _INDENT)
    return "\n".join([*lines, "", counted(verdicts)])


def counted(verdicts: Iterable[Verdict]) -> str:
    """Return how many verdicts there are of each state."""
    counts = Counter(each.state for each in verdicts)
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    return textwrap.wrap(plain(text), columns, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False)


def plain(text: str) -> str:
    """Return a text without control characters, which could move the cursor, cut off at its limit."""
    clean = "".join(each if each.isprintable() else " " for each in text[: _TEXT_LIMIT + 1])
    return clean if len(clean) <= _TEXT_LIMIT else f"{clean[: _TEXT_LIMIT - 1]}…"
