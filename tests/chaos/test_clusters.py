"""Clusters of NATS and etcd with TLS under faults: servers are killed, restarted, frozen and cut off from all others,
as is the machine of a worker. No answer over HTTP is lost or wrong, and the fleet is whole again afterwards.

Partitions last 1 s in `all`, and 30 and 300 s in `long`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import CLUSTERS_DECK
from tests.chaos.stack import DEFAULTS
from tests.chaos.storm import Settings, run
from tests.namespaces import unfit

SEED = 1
MOST_S = 1800.0
HEAL_LIMIT_S = 180.0
PER_S = 2.0
UNFIT = unfit()
pytestmark = pytest.mark.skipif(bool(UNFIT), reason=UNFIT or "-")


async def survives(folder: Path, capsys: pytest.CaptureFixture[str], settings: Settings) -> None:
    told: list[str] = [f"seed {settings.seed}, with clusters"]
    outcome = await run(settings, folder, told.append)
    with capsys.disabled():
        print("", *told, sep="\n")
    assert len(outcome.faults) == settings.most_faults
    assert outcome.verdict.answered > 3 * settings.most_faults
    assert outcome.verdict.good, "\n".join(told)


def settings(faults: int, partitions_s: tuple[float, ...], seed: int = SEED) -> Settings:
    return Settings(
        seed,
        MOST_S,
        faults,
        PER_S,
        detection=DEFAULTS,
        clusters=True,
        partitions_s=partitions_s,
        heal_limit_s=HEAL_LIMIT_S,
    )


@pytest.mark.timeout(1500)
async def test_no_server_of_a_cluster_and_no_cut_costs_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await survives(tmp_path, capsys, settings(len(CLUSTERS_DECK), (1.0,)))


@pytest.mark.tier("long")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("for_s", [30.0, 300.0])
async def test_no_long_cut_costs_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], for_s: float) -> None:
    await survives(tmp_path, capsys, settings(len(CLUSTERS_DECK), (for_s,), SEED + 1))
