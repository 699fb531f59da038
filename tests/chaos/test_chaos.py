"""The stack under faults: one seed of a minute, more on a slow machine, and half of that with roles.
`python -m tests.chaos` has longer runs, and is stricter about how soon all is whole again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.chaos.plan import Target
from tests.chaos.stack import FAST
from tests.chaos.storm import Settings, run

SEED = 9582
"""Its first ten faults befall everything there is."""
FAULTS = 16
ROLES_SEED = 23739
"""Its first faults freeze and kill a decode worker, a prefill worker, and the kvbm."""
ROLES_FAULTS = 8
MOST_S = 600.0
DETECTION = msgspec.structs.replace(FAST, lease_ttl_s=6.0)
"""Where other tests write much to a slow disk, etcd may not answer for 3 s."""
HEAL_LIMIT_S = 180.0
"""Started again on a machine of which six others have a part each, a frontend was ready after 32 s."""


@pytest.mark.chaos
@pytest.mark.timeout(1500)
async def test_no_fault_costs_a_request_its_end_a_token_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = [f"seed {SEED}"]
    settings = Settings(SEED, MOST_S, FAULTS, detection=DETECTION, heal_limit_s=HEAL_LIMIT_S)
    outcome = await run(settings, tmp_path, told.append)
    with capsys.disabled():
        print("", *told, sep="\n")
    everything: set[Target] = {"worker", "engine", "router", "frontend", "kvbm", "nats", "etcd"}
    assert {happened.fault.target for happened in outcome.faults} == everything
    assert outcome.verdict.answered > 100
    assert outcome.verdict.good, "\n".join(told)


@pytest.mark.chaos
@pytest.mark.timeout(1500)
async def test_with_roles_neither_half_costs_a_request_its_end_a_token_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = [f"seed {ROLES_SEED}, with roles"]
    settings = Settings(ROLES_SEED, MOST_S, ROLES_FAULTS, detection=DETECTION, roles=True, heal_limit_s=HEAL_LIMIT_S)
    outcome = await run(settings, tmp_path, told.append)
    with capsys.disabled():
        print("", *told, sep="\n")
    halves: set[Target] = {"prefill", "decode", "decode engine", "kvbm"}
    assert {happened.fault.target for happened in outcome.faults} == halves
    assert outcome.hand_overs
    assert outcome.verdict.good, "\n".join(told)
