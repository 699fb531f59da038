"""deploy/local/autoscale/flags.py: what the flags of `headrace autoscale` mean, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deploy.local.autoscale.autoscale import autoscale
from deploy.local.autoscale.capacity import ROLES, WorkerRole
from deploy.local.autoscale.decider import DaySchedule, WorkerBounds
from deploy.local.autoscale.flags import check_flags, policy_of, times_of, worker_times
from deploy.local.show.fleet import FleetConfig
from deploy.local.size.files import read_profile
from deploy.local.usage import AutoscaleFlags
from shared.errors import ConfigError
from tests.deploy.size.test_plan import KV_TOKENS, shared_machine, write_profile


def flags(folder: Path, **changes: object) -> AutoscaleFlags:
    return replace(AutoscaleFlags(profile=write_profile(folder)), **changes)


def test_bounds_are_for_every_role_or_by_role(tmp_path: Path) -> None:
    given = flags(tmp_path, min="0", max="prefill=2,decode=6")
    times = times_of(given, ["made"], 0)
    assert times.kv_tokens == KV_TOKENS
    bounds = policy_of(given, times, ["prefill"]).bounds
    assert bounds == {"prefill": WorkerBounds(0, 2), "decode": WorkerBounds(0, 6)}
    assert policy_of(flags(tmp_path), times, []).bounds == {"aggregated": WorkerBounds(1, 8)}
    with pytest.raises(ConfigError, match="the fleet's workers are aggregated"):
        policy_of(given, times, ["aggregated"])


def test_workers_of_a_shared_machine_have_the_times_of_busy_ones(tmp_path: Path) -> None:
    alone, busy = (worker_times(read_profile(shared_machine(tmp_path, slower)), 1.0) for slower in (1.0, 2.0))
    assert busy.step_s(4, 500) == pytest.approx(2 * alone.step_s(4, 500))


def test_a_schedule_is_a_time_of_the_day_and_a_number(tmp_path: Path) -> None:
    given = flags(tmp_path, schedule=["08:00-18:30 3", "22:00-06:00 decode=2"])
    found = policy_of(given, times_of(given, [], 0), ["prefill", "decode"]).schedules
    assert found[:3] == tuple(DaySchedule(480, 1110, role, 3) for role in ROLES)
    assert found[3:] == (DaySchedule(1320, 360, "decode", 2),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min": "many"}, "--min many: not N or ROLE=N"),
        ({"max": "encode=1"}, "--max encode=1: not N or ROLE=N"),
        ({"max": "257"}, "with 0 to 256"),
        ({"min": "9"}, "--min 9 is more than --max 8"),
        ({"schedule": ["8-18 3"]}, "not HH:MM-HH:MM N"),
        ({"schedule": ["08:00-25:00 3"]}, "not HH:MM-HH:MM N"),
        ({"cool_down": 0.0}, "--cool-down is 1 to 3600"),
        ({"every": 0.0}, "--every is 0.2 to 60"),
        ({"ttft_p90": float("nan")}, "--ttft-p90 is 0.001 to 3600"),
        ({"launcher": "metric"}, "--launcher metric needs --metrics"),
        ({"compose_file": ["a.yaml"]}, "--compose-file needs --launcher compose"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_flags(flags(tmp_path, **changes))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "models", "said"),
    [
        ({}, ["other"], "is a profile of made, and the fleet serves other"),
        ({}, ["made", "other"], "several models"),
        ({"decode": [(1, 0, 0.01)]}, ["made"], "too few points"),
        ({"format": 99}, ["made"], "format 99"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(
    changes: dict[str, Any], models: list[str], said: str, tmp_path: Path
) -> None:
    given = AutoscaleFlags(profile=write_profile(tmp_path, **changes))
    with pytest.raises(ConfigError, match=said):
        times_of(given, models, 0)


def test_without_a_profile_it_is_said_what_makes_one_before_the_fleet_is_asked(tmp_path: Path) -> None:
    given = AutoscaleFlags(profile=tmp_path / "nothing.json")
    with pytest.raises(ConfigError) as refused:
        autoscale(FleetConfig(), given)
    assert f"--profile {given.profile}: no such file; " in str(refused.value)
    for command in (" profile`", " estimate MODEL --gpu NAME --out "):
        assert command in str(refused.value)


def test_what_the_workers_have_room_for_counts_before_what_the_profile_says(tmp_path: Path) -> None:
    assert times_of(flags(tmp_path), ["made"], 1000.0).kv_tokens == 1000


def test_every_role_has_a_name() -> None:
    roles: tuple[WorkerRole, ...] = ("aggregated", "prefill", "decode")
    assert roles == ROLES
