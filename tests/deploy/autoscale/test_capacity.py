"""deploy/local/autoscale/capacity.py: the number of workers against what a simulation of the fleet finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.autoscale.capacity import (
    LEAST_STEP_TOKENS,
    ROLES,
    STEP_S,
    RequestMix,
    ScaleGoals,
    WorkerTimes,
    workers_needed,
)
from deploy.local.autoscale.flags import worker_times
from deploy.local.size.profile_file import decode_profile
from deploy.local.size.traffic import Lengths, drawn_traffic
from services.virtual.run import run
from services.worker import limits
from shared.measured_times import MeasuredTimes
from shared.messages.virtual import VirtualRun
from tests.deploy.size.test_plan import KV_TOKENS, write_profile

GOALS = ScaleGoals(1.0, 0.1)
MOST = 16


def times(folder: Path, speed: float) -> WorkerTimes:
    file = write_profile(folder, speed)
    profile = decode_profile(file.read_bytes(), str(file))
    return worker_times(profile, KV_TOKENS)


def simulated(folder: Path, rate: float, prompt: int, output: int, decode: int = 0) -> int:
    """The fewest workers with which nine first tokens of ten and the median time a token are in time. Those that
    compute prompts, where others `decode`."""
    made = drawn_traffic(Lengths(rate=rate, requests=300, prompt=prompt, output=output, spread=0.5, shared=0, seed=1))
    load = folder / f"load-{rate}-{prompt}-{output}.jsonl"
    load.write_bytes(made.lines())
    for workers in range(1, MOST):
        done = run(
            VirtualRun(
                trace=str(load),
                block_size=made.block_size,
                times=str(folder / "profile.json"),
                workers=0 if decode else workers,
                prefill=workers if decode else 0,
                decode=decode,
                store_tokens=40 * KV_TOKENS if decode else 0,
                kv_tokens=KV_TOKENS,
                max_running=64,
            )
        )
        if done.ttft_s.p90 <= GOALS.ttft_s and done.itl_s.p50 <= GOALS.itl_s and not done.failed:
            return workers
    return MOST


@pytest.mark.parametrize(("rate", "prompt", "output"), [(4, 2000, 100), (10, 1000, 50), (6, 4000, 20), (8, 500, 200)])
def test_the_number_is_within_one_of_that_of_a_simulation(
    rate: float, prompt: int, output: int, tmp_path: Path
) -> None:
    one = times(tmp_path, 0.3)
    needed = workers_needed("aggregated", rate, RequestMix(prompt, 0, output), one, GOALS, MOST)
    found = simulated(tmp_path, rate, prompt, output)
    assert abs(needed - found) <= 1


@pytest.mark.parametrize(("speed", "rate", "prompt"), [(0.3, 4, 2000), (0.15, 10, 500), (1.0, 8, 4000)])
def test_so_is_the_number_of_workers_that_compute_prompts_alone_whose_steps_are_shorter(
    speed: float, rate: float, prompt: int, tmp_path: Path
) -> None:
    one, mix = times(tmp_path, speed), RequestMix(prompt, 0, 50)
    needed = workers_needed("prefill", rate, mix, one, GOALS, MOST)
    found = simulated(tmp_path, rate, prompt, 50, decode=workers_needed("decode", rate, mix, one, GOALS, MOST))
    assert abs(needed - found) <= 1


def test_the_steps_of_roles_are_those_that_workers_have() -> None:
    assert {"aggregated": limits.STEP_S["cpu"], "prefill": limits.PREFILL_STEP_S} == STEP_S
    assert LEAST_STEP_TOKENS == limits.LEAST_STEP_TOKENS


def test_a_prompt_takes_the_steps_that_fit_and_the_rest_of_one() -> None:
    prefill = MeasuredTimes([(0, 0, 0.1), (100, 0, 0.3), (0, 1000, 0.1), (100, 1000, 0.3)], "prefill")
    one = WorkerTimes(prefill, MeasuredTimes([(1, 0, 0.1)], "decode"), 0.0, 1e6, 64)
    assert one.prompt_s(RequestMix(50, 0, 1), 0.25) == pytest.approx(0.2)
    assert one.prompt_s(RequestMix(750, 600, 1), 0.2) == pytest.approx(3 * 0.2 + 0.1, rel=0.05)
    assert one.prompt_s(RequestMix(160, 0, 1), 0.01) == pytest.approx(10 * 0.132 + 0.1), (
        "as few tokens as a step computes"
    )


def test_no_requests_need_no_workers_and_no_worker_is_more_than_the_most(tmp_path: Path) -> None:
    one, mix = times(tmp_path, 1.0), RequestMix(2000, 0, 100)
    assert workers_needed("aggregated", 0.0, mix, one, GOALS, MOST) == 0
    assert workers_needed("aggregated", 1e9, mix, one, GOALS, MOST) == MOST
    assert workers_needed("aggregated", 1.0, mix, one, GOALS, 0) == 0


def test_cached_prompts_need_fewer_workers(tmp_path: Path) -> None:
    one = times(tmp_path, 0.3)
    cold, warm = (workers_needed("prefill", 12, RequestMix(4000, cached, 20), one, GOALS, MOST) for cached in (0, 3600))
    assert warm < cold


@given(st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 1), st.floats(1, 1e5), st.sampled_from(ROLES))
def test_any_load_needs_a_number_within_the_bound(
    rate: float, prompt: float, cached: float, output: float, role: object
) -> None:
    prefill = MeasuredTimes([(16, 0, 0.01), (4096, 0, 0.2)], "prefill")
    one = WorkerTimes(prefill, MeasuredTimes([(1, 0, 0.005), (64, 0, 0.01)], "decode"), 0.0, 1000, 64)
    mix = RequestMix(prompt, cached * prompt, output)
    assert 0 <= workers_needed(role, rate, mix, one, GOALS, MOST) <= MOST  # type: ignore[arg-type]
