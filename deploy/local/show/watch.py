"""`headrace status --watch`: what `status` shows, again and again, with what the services did in between."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from deploy.local import probe
from deploy.local.show.fleet import FleetConfig, discovery_entries
from deploy.local.show.overview import InstanceRow, render
from deploy.local.show.rates import Sample, departures, rates, render_rates, sample
from deploy.local.show.status import collect
from deploy.local.terminal import highlight
from shared.errors import DiscoveryDown

DISCOVERY_LIMIT_S = 5.0
SCRAPE_LIMIT_S = 1.0
METRICS_LIMIT_BYTES = 4 << 20
"""The maximum size of a process's metrics: a frontend with 1,000 keys has 1 MB."""


def watch(config: FleetConfig, every_s: float) -> int:
    """Show the fleet every `every_s` seconds until Ctrl-C. Raise DiscoveryDown if it cannot be read at first."""
    logging.basicConfig(level=logging.CRITICAL)  # silence the log of retry loops; the notes have the reason
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(config, every_s))
    return 0


async def _watch(config: FleetConfig, every_s: float) -> None:
    values = await discovered(config)
    samples: Mapping[str, Sample] = {}
    known: dict[str, str] = {}
    gone: dict[str, tuple[str, float]] = {}
    notes: list[str] = []
    while True:
        begun_s = time.monotonic()
        view = await collect(config, values, notes)
        former, (samples, silent) = samples, await scrape(view.instances)
        alive = {row.instance: row.service for row in view.instances}
        gone = departures(known, alive, gone, begun_s)
        known = alive
        lost = [f"gone: {service} {name}, {begun_s - since_s:.0f} s ago" for name, (service, since_s) in gone.items()]
        head = f"{time.strftime('%H:%M:%S')}, every {every_s:g} s; Ctrl-C ends"
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        _show("\n".join([head, "", render_rates(rates(former, samples)), "", render(view, columns), *silent, *lost]))
        await asyncio.sleep(max(0.0, begun_s + every_s - time.monotonic()))
        try:
            values, notes = await discovered(config), []
        except DiscoveryDown as wrong:
            notes = [f"{wrong}; these are the processes that were alive before"]


async def discovered(config: FleetConfig) -> dict[str, bytes]:
    """Return discovery's keys and values. Raise DiscoveryDown, also at the limit."""
    try:
        async with asyncio.timeout(DISCOVERY_LIMIT_S):
            return await discovery_entries(config)
    except TimeoutError:
        shown = config.discovery_shown
        raise DiscoveryDown(f"discovery did not answer within {DISCOVERY_LIMIT_S:g} s: {shown}") from None


async def scrape(instances: Sequence[InstanceRow]) -> tuple[dict[str, Sample], list[str]]:
    """Return instance → sample, and a line for each instance that gave none in time."""
    samples: dict[str, Sample] = {}
    silent: list[str] = []

    async def ask(row: InstanceRow) -> None:
        try:
            status, body = await probe.get(
                f"{row.http}/metrics", timeout_s=SCRAPE_LIMIT_S, limit_bytes=METRICS_LIMIT_BYTES
            )
            if status != 200:
                raise OSError(f"status {status}")
            samples[row.instance] = sample(row.service, body.decode(), time.monotonic())
        except (OSError, ValueError, KeyError) as wrong:
            reason = getattr(wrong, "strerror", None) or wrong
            silent.append(f"no answer: {row.service} {row.instance} at {row.http}/metrics: {reason}")

    await asyncio.gather(*map(ask, instances))
    return samples, sorted(silent)


def _show(text: str) -> None:
    """Show a view: on a terminal in place of the former one, else below it."""
    if sys.stdout.isatty():
        columns, lines = shutil.get_terminal_size()
        shown = highlight(fit(text, columns, lines - 1), sys.stdout)
        # Home; each line is written over the former one, and what is left of it is erased, so that nothing flickers.
        text = "\033[H" + "".join(f"{line}\033[K\n" for line in shown.splitlines()) + "\033[J"
    else:
        text += "\n\n"
    sys.stdout.write(text)
    sys.stdout.flush()


def fit(text: str, columns: int, lines: int) -> str:
    """Return as much of a text as a terminal has room for, and how much is left out."""
    rows = [row[:columns] for row in text.splitlines()]
    if len(rows) > lines:
        rows[lines - 1 :] = [f"… {len(rows) - lines + 1} more lines"]
    return "\n".join(rows)
