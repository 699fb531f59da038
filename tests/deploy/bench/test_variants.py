from __future__ import annotations

import pytest

from deploy.local.bench.variants import Variant, variants
from deploy.local.usage import UpFlags, parse
from shared.errors import ConfigError

SIMULATED = ["--engine", "simulated"]


def test_each_value_of_a_setting_is_a_fleet_of_simulated_workers() -> None:
    assert variants(["policy=round-robin,kv"], ["--workers", "4"]) == [
        Variant(f"policy={policy}", [*SIMULATED, "--workers", "4", "--policy", policy])
        for policy in ("round-robin", "kv")
    ]
    assert variants([], ["--engine", "echo"]) == [Variant("", ["--engine", "echo"])]


def test_two_settings_make_all_combinations() -> None:
    found = variants(["worker.max_running=8,32", "simulated.speed=1,2"], [])
    assert [each.name.split() for each in found] == [
        [f"worker.max_running={running}", f"simulated.speed={speed}"] for running in (8, 32) for speed in (1, 2)
    ]
    assert found[1].words == [*SIMULATED, "--set", "worker.max_running=8", "--simulated", "speed=2"]


def test_a_topology_says_whether_there_is_a_block_store_and_which_roles() -> None:
    given = ["--workers=4", "--kvbm-bytes", "1G"]
    aggregated, store, split, roles = variants(["topology=aggregated,store,split,1+3"], given)
    assert aggregated.words == [*SIMULATED, "--workers=4", "--kvbm-bytes", "0"]
    assert store.words == [*SIMULATED, *given]
    assert split.words == [*SIMULATED, "--kvbm-bytes", "1G", "--prefill", "2", "--decode", "2"]
    assert roles.words[-4:] == ["--prefill", "1", "--decode", "3"]


def test_the_flags_of_every_fleet_are_flags_of_up() -> None:
    compared = ["policy=kv,random", "topology=aggregated,split", "kvbm_bytes=1G,2G", "router.events=on,off"]
    for each in variants(compared, ["--model", "tiny"]):
        assert isinstance(parse(["up", *each.words]), UpFlags)


@pytest.mark.parametrize(
    ("compared", "words", "said"),
    [
        (["policy=kv"], [], "--compare policy=kv: not NAME=VALUE,VALUE with two values or more"),
        (["policy"], [], "--compare policy: not NAME=VALUE,VALUE"),
        (["policy=kv,kv"], [], "with two values or more"),
        (["policy=kv,"], [], "with two values or more"),
        (["polcy=kv,random"], [], "--compare polcy: no setting; there are topology, SERVICE.SETTING"),
        (["single=a,b"], [], "--compare single: no setting"),
        (["port=1,2"], [], "--compare port: no setting"),
        (["wrker.max_running=1,2"], [], "--compare wrker.max_running: no setting"),
        (["topology=split,other"], [], "topology=other: must be aggregated, store, split or P+D"),
        (["topology=split,store"], ["--workers", "1"], "split needs two --workers or more"),
        (["policy=kv,random"], ["--port", "1"], "--port: `bench` starts fleets of its own"),
        ([f"{name}=1,2,3" for name in ("workers", "routers", "frontends")], [], "27 fleets are more than 16"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(compared: list[str], words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        variants(compared, words)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
