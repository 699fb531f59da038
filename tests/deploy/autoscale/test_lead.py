"""Two autoscalers of one fleet: the first one acts, on etcd and on files."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from deploy.local.autoscale.lead import AutoscalerEntry, Lead
from shared import subjects
from shared.config import DiscoveryConfig, ServiceConfig
from shared.discovery.backends import open_discovery
from shared.discovery.contract import Discovery
from shared.errors import DiscoveryDown

LIMIT_S = 60.0
HERE = f"process {os.getpid()} on {platform.node()}"


@pytest.fixture(params=["file", "etcd"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ServiceConfig:
    discovery = (
        DiscoveryConfig(backend="file", path=str(tmp_path))
        if request.param == "file"
        else DiscoveryConfig(endpoints=(request.getfixturevalue("etcd_endpoint"),))
    )
    return ServiceConfig(namespace=f"t{secrets.token_hex(6)}", discovery=discovery)


@pytest.fixture
async def leads(config: ServiceConfig) -> AsyncIterator[list[Lead]]:
    three = [Lead(config) for _ in range(3)]
    yield three
    for each in three:
        await each.close()


@pytest.fixture
async def discovery(config: ServiceConfig) -> AsyncIterator[Discovery]:
    one = open_discovery(config.discovery)
    yield one
    await one.close()


async def test_the_first_acts_and_the_others_say_which_that_is_until_it_has_ended(leads: list[Lead]) -> None:
    first, second, third = leads
    assert [await each.other() for each in leads] == ["", HERE, HERE]
    assert [await each.other() for each in leads] == ["", HERE, HERE]
    await first.close()
    assert [await each.other() for each in (third, second)] == [HERE, ""]
    await second.close()
    assert await third.other() == ""


async def test_of_several_that_start_at_once_exactly_one_acts(leads: list[Lead]) -> None:
    await asyncio.gather(*(each.other() for each in leads))
    assert sorted([await each.other() for each in leads]) == ["", HERE, HERE]


async def test_another_fleet_has_an_autoscaler_of_its_own(leads: list[Lead], config: ServiceConfig) -> None:
    other = Lead(msgspec.structs.replace(config, namespace=f"{config.namespace}2"))
    assert [await leads[0].other(), await other.other()] == ["", ""]
    await other.close()


async def test_services_do_not_see_the_entries_of_autoscalers(
    leads: list[Lead], config: ServiceConfig, discovery: Discovery
) -> None:
    await leads[0].other()
    assert await discovery.list(subjects.namespace_prefix(config.namespace)) == {}
    assert len(await discovery.list(subjects.autoscalers_prefix(config.namespace))) == 1


async def test_an_autoscaler_whose_entry_is_gone_does_not_act(leads: list[Lead], config: ServiceConfig) -> None:
    leads[0]._prefix = subjects.autoscalers_prefix("elsewhere")
    with pytest.raises(DiscoveryDown, match="discovery has lost the entry of this autoscaler"):
        await leads[0].other()


async def test_an_entry_that_is_none_is_named_and_none_acts(
    leads: list[Lead], config: ServiceConfig, discovery: Discovery
) -> None:
    prefix = subjects.autoscalers_prefix(config.namespace)
    registration = await discovery.register(lambda _epoch: {f"{prefix}x": b'{"rank": "first"}'})
    with pytest.raises(DiscoveryDown, match=f"an entry below {prefix} is no autoscaler's"):
        await leads[0].other()
    await registration.close()


def test_the_lowest_rank_acts_whatever_the_names() -> None:
    old, new = AutoscalerEntry(1, "z", "b", 2), AutoscalerEntry(2, "a", "a", 1)
    assert min(old, new) is old
