"""The stack under faults: one seed of a minute, more on a slow machine, and half of that with roles. `./check long`
has an hour of `python -m tests.chaos`.

The services find what is wrong as late as they do by default: where a slow machine is at fault, all would soon be
thought dead. `python -m tests.chaos` has longer runs with more requests, and is stricter about how soon all is whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import Target
from tests.chaos.stack import DEFAULTS
from tests.chaos.storm import Settings, run

SEED = 9582
"""Its first ten faults befall everything there is."""
FAULTS = 10
ROLES_SEED = 23739
"""Its first five faults freeze and kill a decode worker, cut a prefill worker off, and kill the kvbm."""
ROLES_FAULTS = 5
MOST_S = 600.0
HEAL_LIMIT_S = 180.0
"""On a machine that was ten times slower than a quiet one, a frontend was ready 73 s after its restart."""
PER_S = 2.0


@pytest.mark.timeout(1500)
async def test_no_fault_costs_a_request_its_end_a_token_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = [f"seed {SEED}"]
    settings = Settings(SEED, MOST_S, FAULTS, PER_S, detection=DEFAULTS, heal_limit_s=HEAL_LIMIT_S)
    outcome = await run(settings, tmp_path, told.append)
    with capsys.disabled():
        print("", *told, sep="\n")
    everything: set[Target] = {"worker", "engine", "router", "frontend", "kvbm", "nats", "etcd"}
    assert {happened.fault.target for happened in outcome.faults} == everything
    assert outcome.verdict.answered > 50
    assert outcome.verdict.good, "\n".join(told)


@pytest.mark.timeout(1500)
async def test_with_roles_neither_half_costs_a_request_its_end_a_token_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = [f"seed {ROLES_SEED}, with roles"]
    settings = Settings(
        ROLES_SEED, MOST_S, ROLES_FAULTS, PER_S, detection=DEFAULTS, roles=True, heal_limit_s=HEAL_LIMIT_S
    )
    outcome = await run(settings, tmp_path, told.append)
    with capsys.disabled():
        print("", *told, sep="\n")
    halves: set[Target] = {"prefill", "decode", "decode engine", "kvbm"}
    assert {happened.fault.target for happened in outcome.faults} == halves
    assert outcome.hand_overs
    assert outcome.verdict.good, "\n".join(told)
