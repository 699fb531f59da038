"""`headrace autoscale`: looks at a fleet, decides, and has a launcher carry it out. decider.py decides; this module
acts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, start_http_server

from deploy.local.autoscale.capacity import Workers
from deploy.local.autoscale.decider import FleetSeen, ScaleDecision, ScalePolicy, ScaleState, decide, spelled
from deploy.local.autoscale.flags import check_flags, models_fault, policy_of, times_of
from deploy.local.autoscale.launchers import scale_compose, scale_up
from deploy.local.autoscale.lead import Lead
from deploy.local.autoscale.watch import kv_tokens, quietest, seen
from deploy.local.check.wire import parse_address
from deploy.local.show.fleet import FleetConfig
from deploy.local.show.overview import Look
from deploy.local.show.rates import Sample
from deploy.local.show.status import discovered, look, scrape
from deploy.local.size.files import read_profile
from deploy.local.usage import AutoscaleFlags
from shared.errors import ConfigError, DiscoveryDown
from shared.metrics import counter, gauge, register_metrics

FIRST_PAUSE_S, LAST_PAUSE_S = 10.0, 600.0
"""The first and the longest time after which a launcher that refused is asked again."""


def pause_after(refusals: int) -> float:
    """Return the seconds until a launcher is asked again that had refused so often before. *Pure.*"""
    return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(refusals, 16))


class ScaleMetrics:
    """The metrics of `headrace autoscale`."""

    # fmt: off
    wanted = gauge("headrace_desired_workers", "role",
        "Workers that the load needs, by role; KEDA or a HorizontalPodAutoscaler may read it",
        "At `--max`: the load needs more than it may have.")
    refusals = counter("headrace_scale_refusals", "",
        "Orders that the launcher has refused", "The output of `headrace autoscale` says why.")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        register_metrics(self, registry)


def autoscale(config: FleetConfig, flags: AutoscaleFlags) -> int:
    """Run until Ctrl-C. Raise ConfigError, and DiscoveryDown if the fleet cannot be read at first."""
    check_flags(flags)
    profile = read_profile(flags.profile, "--profile")  # before anything is asked
    registry = CollectorRegistry()
    metrics = ScaleMetrics(registry)
    if flags.metrics:
        address = parse_address(flags.metrics)
        if address is None:
            raise ConfigError(f"--metrics {flags.metrics}: not HOST:PORT")
        try:
            start_http_server(address[1], address[0], registry)
        except OSError as wrong:
            raise ConfigError(f"--metrics {flags.metrics}: {wrong.strerror}") from None
    with suppress(KeyboardInterrupt):
        asyncio.run(Autoscaler(config, flags, metrics, profile.subject.model).run())
    return 0


class Autoscaler:
    """One fleet and its launcher."""

    def __init__(self, config: FleetConfig, flags: AutoscaleFlags, metrics: ScaleMetrics, profiled: str) -> None:
        """`profiled` is the model of the profile."""
        self._config, self._flags, self._metrics, self._profiled = config, flags, metrics, profiled
        self._samples: Mapping[str, Sample] = {}
        self._policy: ScalePolicy | None = None
        self._state = ScaleState()
        self._ordered: Workers = {}
        """What the launcher was asked for last, and has taken up; before that, what was there."""
        self._refused = 0
        """How often the launcher has refused since then."""
        self._again_s = 0.0
        """When a launcher that has refused is asked again."""
        self._said: tuple[str, ...] = ()
        self._shown: object = None
        """What was seen and decided when that was said last."""

    async def run(self) -> None:
        """Look and decide again and again, until cancelled."""
        lead = Lead(self._config)
        try:
            while True:
                begun_s = time.monotonic()
                try:
                    await self._turn(lead)
                except DiscoveryDown as wrong:
                    if self._policy is None:
                        raise
                    self._say(f"nothing changes: {wrong}")
                await asyncio.sleep(max(0.0, begun_s + self._flags.every - time.monotonic()))
        finally:
            await lead.close()

    async def _turn(self, lead: Lead) -> None:
        """Look once, decide, and carry it out, unless another one leads."""
        found = await look(self._config, await discovered(self._config))
        samples, _ = await scrape([row for row in found.overview.instances if row.service == "frontend"])
        now, self._samples = seen(found, self._samples, samples), samples
        models = [row.model for row in found.overview.models]
        if self._policy is None:
            self._policy = policy_of(self._flags, times_of(self._flags, models, kv_tokens(found)), now.alive.keys())
            self._ordered = {role: now.alive.get(role, 0) for role in self._policy.bounds}
        if fault := models_fault(self._flags.profile, self._profiled, models):  # another model has come since
            self._say(f"nothing changes: {fault}")
            return
        before, clock = self._state.wanted or self._ordered, datetime.now().astimezone()
        minute = 60 * clock.hour + clock.minute
        decision, self._state = decide(self._policy, self._state, now, time.monotonic(), minute)
        other = "" if self._flags.dry_run else await lead.other()
        if other:
            self._say(f"{other} scales this fleet already: this one watches, and takes over once that one has ended")
        else:
            for role, number in decision.wanted.items():
                self._metrics.wanted.labels(role).set(number)
            self._say(*self._news(before, now, decision), *decision.notes)
        if self._flags.dry_run or other:
            there = {role: now.alive.get(role, 0) for role in decision.wanted}
            self._state = replace(self._state, wanted=there)
            return
        if decision.again:
            self._ordered = {}
        if decision.wanted != self._ordered and time.monotonic() >= self._again_s:
            await self._order(decision.wanted, found)

    def _news(self, before: Workers, now: FleetSeen, decision: ScaleDecision) -> list[str]:
        """Return a line of what is seen and decided, if another number of workers is there, serves or is wanted than
        when that was said last, or if requests begin or end to come."""
        wanted = decision.wanted
        seen_now = (before, now.alive, now.serving, any(decision.needed.values()), wanted)
        if seen_now == self._shown:
            return []
        self._shown = seen_now
        if before != wanted:
            return [f"{spelled(before)} -> {spelled(wanted)}: {decision.reason}"]
        there: Workers = {role: now.alive.get(role, 0) for role in wanted}
        serving: Workers = {role: now.serving.get(role, 0) for role in wanted}
        serve = "all serve" if there == serving else f"{spelled(serving)} serve"
        return [f"{spelled(there)} there, {serve}; {spelled(wanted)} wanted: {decision.reason}"]

    async def _order(self, wanted: Workers, found: Look) -> None:
        flags, failed = self._flags, ""
        if flags.launcher == "up":
            failed = await scale_up(flags.state_dir.scale, wanted, quietest(found.overview.instances))
        elif flags.launcher == "compose":
            failed = await scale_compose(flags.compose_file, wanted)
        if not failed:
            self._refused, self._ordered = 0, wanted
            return
        pause_s = pause_after(self._refused)
        self._refused, self._again_s = self._refused + 1, time.monotonic() + pause_s
        self._metrics.refusals.inc()
        self._say(f"refused: {failed}; the next try is in {pause_s:g} s")

    def _say(self, *lines: str) -> None:
        """Print what was not said at the last turn."""
        for line in lines:
            if line not in self._said:
                print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
        self._said = lines
