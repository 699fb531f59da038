"""Turns the flags of `autoscale` into a policy."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from deploy.local.autoscale.capacity import ROLES, ScaleGoals, WorkerRole, WorkerTimes
from deploy.local.autoscale.decider import KEPT, DaySchedule, ScalePolicy, WorkerBounds
from deploy.local.size.files import read_profile
from deploy.local.size.flags import check_ranges
from deploy.local.size.profile_file import Profile
from deploy.local.usage import AutoscaleFlags
from shared.errors import ConfigError
from shared.measured_times import MeasuredTimes

MOST = 256
"""The most workers of a role."""
_SCHEDULE = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d) +(\S+)")


def check_flags(flags: AutoscaleFlags) -> None:
    """Raise ConfigError for numbers out of range."""
    ranges: dict[str, tuple[float, float]] = {
        "ttft_p90": (0.001, 3600),
        "itl": (0.0001, 3600),
        "every": (0.2, 60),
        "start_s": (1, 3600),
        "cool_down": (1, KEPT * flags.every),
        "headroom": (1, 10),
        "total": (0, MOST),
    }
    check_ranges(flags, ranges)
    if flags.compose_file and flags.launcher != "compose":
        raise ConfigError("--compose-file needs --launcher compose")
    if flags.launcher == "metric" and not flags.metrics:
        raise ConfigError("--launcher metric needs --metrics HOST:PORT")
    for role in ROLES:
        if _numbers(flags.min, "--min", 1)[role] > _numbers(flags.max, "--max", 8)[role]:
            raise ConfigError(f"--min {flags.min} is more than --max {flags.max}")
    _schedules(flags.schedule)


def policy_of(flags: AutoscaleFlags, times: WorkerTimes, there: Collection[WorkerRole]) -> ScalePolicy:
    """Return the policy for a fleet with workers of these roles. Raise ConfigError."""
    named: set[WorkerRole] = {role for role in ROLES if f"{role}=" in f"{flags.min},{flags.max}"}
    roles: set[WorkerRole] = {*there} or named or {"aggregated"}
    if "aggregated" not in roles:  # one of the two may have no worker now
        roles |= {"prefill", "decode"}
    if named - roles:
        raise ConfigError(f"--min, --max: the fleet's workers are {', '.join(sorted(roles))}")
    least, most = _numbers(flags.min, "--min", 1), _numbers(flags.max, "--max", 8)
    return ScalePolicy(
        times=times,
        goals=ScaleGoals(flags.ttft_p90, flags.itl),
        bounds={role: WorkerBounds(least[role], most[role]) for role in ROLES if role in roles},
        schedules=_schedules(flags.schedule),
        total=flags.total,
        start_s=flags.start_s,
        cool_down_s=flags.cool_down,
        window_s=max(4 * flags.every, min(60.0, flags.cool_down)),
        headroom=flags.headroom,
    )


def times_of(flags: AutoscaleFlags, models: Collection[str], kv_tokens: float) -> WorkerTimes:
    """Return the times of a worker, from its profile. `models` are those that the fleet serves, `kv_tokens` is what one
    of its workers has room for; 0 if that is not known. Raise ConfigError."""
    profile = read_profile(flags.profile, "--profile")
    if fault := models_fault(flags.profile, profile.subject.model, models):
        raise ConfigError(fault)
    return worker_times(profile, kv_tokens or profile.kv_tokens or 1e9)


def models_fault(file: Path, profiled: str, models: Collection[str]) -> str:
    """Return why a fleet with these models cannot be scaled by a file with the profile of one. Empty if it can."""
    if len(models) > 1:
        return f"the fleet serves several models, and its load is not counted apart: {', '.join(sorted(models))}"
    if models and profiled not in models:
        return f"{file} is a profile of {profiled}, and the fleet serves {', '.join(models)}"
    return ""


def worker_times(profile: Profile, kv_tokens: float) -> WorkerTimes:
    """Return the times of a worker that has room for `kv_tokens`, while its machine's others are as busy."""
    measured = profile.busy or profile
    return WorkerTimes(
        prefill=MeasuredTimes(measured.prefill, "prefill"),
        decode=MeasuredTimes(measured.decode, "decode"),
        overhead_s=profile.overhead_s,
        kv_tokens=kv_tokens,
        max_running=profile.subject.most,
    )


def _numbers(text: str, flag: str, default: int) -> Mapping[WorkerRole, int]:
    """Return the number of each role in `N` or `ROLE=N,…`; roles that are not named have the default."""
    found: dict[WorkerRole, int] = dict.fromkeys(ROLES, default)
    for word in text.split(","):
        name, equals, number = word.strip().rpartition("=")
        if not (number.isdecimal() and int(number) <= MOST) or (equals and name not in ROLES):
            raise ConfigError(f"{flag} {text}: not N or ROLE=N,…, with 0 to {MOST} and the roles {', '.join(ROLES)}")
        found.update({role: int(number) for role in ROLES if name in ("", role)})
    return found


def _schedules(texts: Collection[str]) -> tuple[DaySchedule, ...]:
    """Return the schedules of `HH:MM-HH:MM N` or `HH:MM-HH:MM ROLE=N`. Raise ConfigError."""
    found = []
    for text in texts:
        match = _SCHEDULE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f'--schedule "{text}": not HH:MM-HH:MM N, or with ROLE=N')
        begin, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
        numbers = _numbers(match[5], "--schedule", 0)
        found += [DaySchedule(begin, end, role, number) for role, number in numbers.items() if number]
    return tuple(found)
