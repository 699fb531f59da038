"""Checks docs/kvbm.md and the block store's part of docs/states.md: settings, codes and states are the real ones; the
policy and the engine in it work as they stand."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from services.kvbm.config import DiskConfig, KvbmConfig, PeersConfig, PoolConfig, StatisticsConfig, TiersConfig
from services.kvbm.tickets.errors import RefusalCode
from services.kvbm.tickets.results import TicketLimits
from services.kvbm.tiers.host_slots import SlotState
from services.kvbm.tiers.policies import BUILT_IN, GuardedPolicy, make_policy
from services.worker.config import KVConnectorConfig as OfWorker
from services.worker.kv_connector import connector
from shared.hashing import ContentKey
from tests.kvbm.store_rig import LIMIT_S, NAMESPACE
from tests.kvbm.test_main import kvbm_process, there

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCUMENTS / "kvbm.md").read_text(encoding="utf-8")
PEERS = (DOCUMENTS / "peers.md").read_text(encoding="utf-8")
STATES = (DOCUMENTS / "states.md").read_text(encoding="utf-8").partition("# A block's states")[2]
POLICY, ENGINE = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


def test_the_settings_and_their_defaults_are_those_that_there_are() -> None:
    tables: dict[str, type[msgspec.Struct]] = {
        "pool": PoolConfig,
        "disk": DiskConfig,
        "tiers": TiersConfig,
        "tickets": TicketLimits,
        "statistics": StatisticsConfig,
        "peers": PeersConfig,
    }
    common = {"namespace", "nats", "discovery", "observe", "trace"}
    assert {field.name for field in msgspec.structs.fields(KvbmConfig)} == {*tables, *common}
    tables["kvbm"] = OfWorker
    expected = {
        f"{table}.{field.name}": "" if field.required else _written(field.default)
        for table, config in tables.items()
        for field in msgspec.structs.fields(config)
    }
    written = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| ?(.*?) ?\|", TEXT + PEERS, re.M)
    assert dict(written) == expected


def _written(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_policy_and_every_code_has_its_row() -> None:
    _, _, policies = TEXT.partition("## Eviction policies")
    policies, _, rest = policies.partition("**A policy of your own**")
    assert set(BUILT_IN) <= set(re.findall(r"^\| `([a-z0-9-]+)` \|", policies, re.M))
    _, _, codes = rest.partition("| code | when |")
    assert sorted(re.findall(r"^\| `(\w+)` \|", codes, re.M)) == sorted(get_args(RefusalCode))


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Import the document's policy as a module; yield its name in the config."""
    assert len(POLICY.splitlines()) <= 30
    (tmp_path / "least_used.py").write_text(POLICY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "least_used:LeastUsedPolicy"
    sys.modules.pop("least_used", None)


def test_the_policy_in_it_lets_go_what_was_used_least_often(policy: str) -> None:
    made = make_policy(policy, 3)
    assert isinstance(made, GuardedPolicy)
    one, two, three = (bytes([number] * 16) for number in (1, 2, 3))
    for key in (one, two, three):
        made.stored(key)
    for key in (one, one, three):
        made.used(key)
    made.backed(one, True)
    assert made.victim(lambda _: True) == two

    def not_two(key: ContentKey) -> bool:
        return key != two

    assert made.victim(not_two) == three
    made.gone(two)
    assert made.victim(lambda _: True) == three
    assert made.problem == ""


async def test_the_engine_in_it_stores_a_block_and_reads_it_again(nats_url: str, tmp_path: Path) -> None:
    (tmp_path / "one_block.py").write_text(ENGINE, encoding="utf-8")
    async with kvbm_process(nats_url, tmp_path):
        await there(tmp_path)
        engine = await asyncio.create_subprocess_exec(
            *(sys.executable, str(tmp_path / "one_block.py"), str(tmp_path / "pool"), nats_url, NAMESPACE),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said, wrong = await asyncio.wait_for(engine.communicate(), LIMIT_S)
        finally:
            if engine.returncode is None:
                engine.kill()
    assert said.decode().split("\n") == ["settled", "the same bytes", ""], wrong.decode()


def test_every_state_of_a_block_and_of_the_link_is_drawn() -> None:
    assert set(get_args(SlotState)) <= set(re.findall(r"\w+", STATES.partition("# A ticket's states")[0]))
    _, _, link = STATES.partition("# The states of an engine's link")
    (states,) = re.findall(r"self\._state: Literal\[(.*?)\]", Path(connector.__file__).read_text(encoding="utf-8"))
    assert re.findall(r'"(\w+)"', states) == list(
        dict.fromkeys(re.findall(r"detached|quieting|attaching|attached", link))
    )
    back_off = f"{connector.BACK_OFF_FIRST_S:g} s, doubling to {connector.BACK_OFF_MOST_S:g} s"
    assert f"The back-off is {back_off}" in link
