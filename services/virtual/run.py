"""Runs one fleet of `headrace plan` in virtual time, and sums up what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from services.virtual.fleet import HOP_S, Late, SimulatedFleet
from services.virtual.journeys import TokenGaps
from services.virtual.loads import LoadTrace, read_trace
from services.virtual.machine import SimulatedMachine, StepTime
from services.virtual.store import StoreSizes
from services.worker.config import OVERTAKING, SimulatedConfig
from services.worker.simulated.runner import read_times
from services.worker.simulated.timing import Timing
from shared.messages.cards import Role
from shared.messages.virtual import Percentiles, VirtualResult, VirtualRun
from shared.percentiles import nearest_ranks


def run(wanted: VirtualRun) -> VirtualResult:
    """Run a load through a fleet at its own pace. Raise ConfigError or OSError if a file cannot be used."""
    load = _load(wanted.trace, wanted.block_size)
    step_s = step_time(wanted.times)
    busy_s = step_time(wanted.times, busy=True) if wanted.machine_workers > 1 else None
    gaps = TokenGaps()
    fleet = SimulatedFleet(
        load,
        wanted.policy,
        capacity_blocks=max(1, wanted.kv_tokens // load.block_size),
        sizes=StoreSizes(wanted.store_tokens // load.block_size, 0) if wanted.store_tokens else None,
        gaps=gaps,
        max_running=wanted.max_running,
        overtaking=OVERTAKING if wanted.overtakes else 0.0,
        late=Late(wanted.late_s, wanted.late_most) if wanted.late_s else None,
    )
    roles: list[tuple[Role, int]] = [
        ("aggregated", wanted.workers),
        ("prefill", wanted.prefill),
        ("decode", wanted.decode),
    ]
    joining: list[Role] = [role for role, workers in roles for _ in range(workers)]
    for begin in range(0, len(joining), wanted.machine_workers):
        machine = SimulatedMachine(fleet.clock, wanted.machine_workers, busy_s)
        for role in joining[begin : begin + wanted.machine_workers]:
            fleet.join(step_s, role, longest_s=wanted.step_s, machine=machine)
    fleet.run()
    return _summed_up(fleet, gaps, max(0.0, wanted.overhead_s - HOP_S))


def _summed_up(fleet: SimulatedFleet, gaps: TokenGaps, before_s: float) -> VirtualResult:
    """Return what came of a run. `before_s` is the part of each first token that is not simulated."""
    ended = [journey for journey in fleet.journeys if journey.end_s >= 0 and not journey.failed]
    begun = [journey for journey in fleet.journeys if journey.first_token_s >= 0]
    prompt_tokens = sum(journey.request.prompt_tokens for journey in begun)
    lasted_s = max(fleet.clock.now_s, 1e-9)
    return VirtualResult(
        ttft_s=percentiles([journey.ttft_s + before_s for journey in begun]),
        itl_s=percentiles(gaps.all_s),
        requests_per_s=len(ended) / lasted_s,
        output_tokens_per_s=sum(journey.request.output_tokens for journey in ended) / lasted_s,
        hit_rate=sum(journey.cached_tokens for journey in begun) / max(1, prompt_tokens),
        failed=sum(bool(journey.failed) for journey in fleet.journeys),
        given_up=any(journey.end_s < 0 for journey in fleet.journeys),
    )


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Return nearest-rank percentiles; zeros without values."""
    return Percentiles(**nearest_ranks(sorted(seconds) or [0.0]))


@lru_cache(maxsize=1)
def _load(trace: str, block_size: int) -> LoadTrace:
    return read_trace(Path(trace), block_size)


@lru_cache(maxsize=2)
def step_time(times: str, *, busy: bool = False) -> StepTime:
    """Return the times of steps in a file, or those while all workers of the machine compute. Raise ConfigError."""
    config = SimulatedConfig(table=times)
    return Timing(config, read_times(config, busy=busy)).step_s
