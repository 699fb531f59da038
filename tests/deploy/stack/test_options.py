"""deploy/local/stack/options.py: what `up` refuses at sight, and what it makes of its flags."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deploy.local.stack.options import checked_options, shared_gpus, takes_turns
from deploy.local.stack.stack import Gpus
from deploy.local.usage import UpFlags
from shared.errors import ConfigError
from shared.processors import usable_processors


@pytest.fixture
def address() -> Iterator[str]:
    """An address at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("prefill", "decode"), [(2, None), (None, 2), (2, 0), (0, 2), (1, 1)])
def test_an_up_that_joins_a_fleet_may_have_workers_of_one_role(
    address: str, prefill: int | None, decode: int | None
) -> None:
    flags = UpFlags(engine="simulated", prefill=prefill, decode=decode, nats=f"nats://{address}", etcd=address)
    options, store = checked_options(flags)
    assert (options.prefill, options.decode, options.workers) == (prefill or 0, decode or 0, 2)
    assert store.needed
    assert store.pool_bytes > 0


def test_an_up_that_joins_a_fleet_has_a_worker_all_the_same(address: str) -> None:
    with pytest.raises(ConfigError, match="are at least 0, 1 together, and 64 together at most"):
        checked_options(UpFlags(prefill=0, decode=0, nats=f"nats://{address}", etcd=address))


def test_an_up_that_joins_a_fleet_may_leave_frontends_and_routers_to_others(address: str) -> None:
    joins = UpFlags(engine="echo", frontends=0, routers=0, nats=f"nats://{address}", etcd=address)
    options, _ = checked_options(joins)
    assert (options.frontends, options.routers, options.workers) == (0, 0, 2)
    for flags in (UpFlags(frontends=0, nats=f"nats://{address}"), UpFlags(routers=0, etcd=address)):
        with pytest.raises(ConfigError, match="s is 1 to 64"):
            checked_options(flags)


def test_services_are_reached_at_the_address_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_options(UpFlags())[0].observe_host == "127.0.0.1"
    monkeypatch.setenv("HEADRACE_OBSERVE_HOST", "10.0.0.7")
    assert checked_options(UpFlags())[0].observe_host == "10.0.0.7"


def test_one_address_is_not_a_fleet(address: str) -> None:
    for flags in (UpFlags(prefill=1, etcd=address), UpFlags(prefill=1, nats=f"nats://{address}")):
        with pytest.raises(ConfigError, match="to join a fleet that has the other role, give its --nats and --etcd"):
            checked_options(flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (UpFlags(single=True, workers=2), "--workers 2"),
        (UpFlags(single=True, workers=0), "--workers 0"),
        (UpFlags(single=True, frontends=2), "--frontends 2"),
        (UpFlags(single=True, routers=3), "--routers 3"),
        (UpFlags(single=True, prefill=1, decode=1), "--prefill"),
        (UpFlags(single=True, decode=1), "--decode"),
        (UpFlags(single=True, engine="attached"), "--engine attached"),
        (UpFlags(single=True, kvbm_bytes="1G"), "--kvbm-bytes"),
        (UpFlags(single=True, weights_bytes="1G"), "--weights-bytes"),
        (UpFlags(single=True, kvbm_disk=Path("/disk")), "--kvbm-disk"),
        (UpFlags(single=True, set=["kvbm.peers.listen=:1"]), "--set kvbm"),
        (UpFlags(single=True, set=["worker.checkpoint.directory=/c"]), "--set worker.checkpoint"),
        (UpFlags(single=True, nats="nats://127.0.0.1:4222"), "--nats"),
        (UpFlags(single=True, etcd="127.0.0.1:2379"), "--etcd"),
        (UpFlags(single=True, discovery="file"), "--discovery file"),
    ],
)
def test_one_process_refuses_what_it_does_not_have_and_names_the_flag(flags: UpFlags, named: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        checked_options(flags)
    assert str(wrong.value).startswith(f"{named}: not with --single, ")
    assert "\n" not in str(wrong.value)


def test_one_process_has_one_service_of_each_kind_and_no_block_store() -> None:
    given = UpFlags(single=True, workers=1, frontends=1, kvbm_bytes="0", set=["worker.max_running=8"])
    for flags in (UpFlags(single=True), given):
        options, store = checked_options(flags)
        assert (options.single, options.frontends, options.routers, options.workers) == (True, 1, 1, 1)
        assert (store.pool_bytes, options.store) == (0, None)
    assert options.overrides == {"worker": [("--max_running", "8")]}


def test_of_two_vllms_on_a_cpu_the_second_starts_when_the_first_serves_unless_two_were_asked_for() -> None:
    assert takes_turns(UpFlags(engine="vllm"), roles=False, on_gpus=False)
    assert not takes_turns(UpFlags(engine="vllm", workers=2), roles=False, on_gpus=False)
    assert not takes_turns(UpFlags(engine="vllm"), roles=True, on_gpus=False)
    assert not takes_turns(UpFlags(engine="vllm"), roles=False, on_gpus=True)
    assert not takes_turns(UpFlags(), roles=False, on_gpus=False)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"engine": "vllm"}, "--engine vllm"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2"),
        ({"models": "a,b"}, "--models"),
    ],
)
def test_an_engine_stands_by_where_one_can(flags: dict[str, str | int], named: str) -> None:
    with pytest.raises(ConfigError, match=f"--standby: not with {named}; the native engine can stand by"):
        checked_options(msgspec.convert({"standby": True, **flags}, UpFlags))
    assert checked_options(UpFlags(standby=True))[0].standby


def test_only_the_native_engine_shares_weights() -> None:
    with pytest.raises(ConfigError, match="--weights-bytes: engine simulated shares no weights"):
        checked_options(UpFlags(engine="simulated", weights_bytes="1G"))
    options, _ = checked_options(UpFlags(weights_bytes="3G"))
    assert options.weights_bytes == 3 << 30
    options, _ = checked_options(UpFlags(engine="simulated", weights_bytes="0"))
    assert options.weights_bytes == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (UpFlags(tensor_parallel=0), "--tensor-parallel 0: it is 1 to 8"),
        (UpFlags(tensor_parallel=9), "--tensor-parallel 9: it is 1 to 8"),
        (
            UpFlags(tensor_parallel=2, engine="vllm"),
            "--tensor-parallel 2: with --engine vllm it is --set worker.vllm.tensor_parallel_size=2",
        ),
        (UpFlags(tensor_parallel=2, engine="echo"), "--tensor-parallel 2: engine echo computes nothing"),
        (
            UpFlags(tensor_parallel=2, device="cuda", prefill=1, decode=1),
            "--tensor-parallel 2: not with --prefill and --device cuda",
        ),
        (
            UpFlags(tensor_parallel=2, device="cuda", weights_bytes="1G"),
            "--tensor-parallel 2: not with --weights-bytes and --device cuda",
        ),
        (UpFlags(tensor_parallel=2, on="ray"), "--tensor-parallel: not with --on ray"),
        *(
            (
                UpFlags(tensor_parallel=more),
                f"--tensor-parallel {more}: more ranks than the processors that can be used",
            )
            for more in range(usable_processors() + 1, 9)
        ),
    ],
)
def test_ranks_are_refused_where_they_are_not_built(flags: UpFlags, named: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        checked_options(flags)
    assert str(wrong.value).startswith(named)


def test_more_ranks_than_gpus_are_refused_unless_they_are_to_share() -> None:
    with pytest.raises(ConfigError, match=r"^--tensor-parallel 2: there must be as many GPUs, and CUDA shows 1$"):
        shared_gpus(1, 0.9, {}, 2)
    assert shared_gpus(1, 0.9, {"ranks_share_gpus": "true"}, 2).workers(None, 2) == 1
    assert shared_gpus(2, 0.9, {}, 2) == Gpus(2, 0.9, {}, 2)


@pytest.mark.skipif(usable_processors() < 2, reason="needs two processors")
def test_workers_get_the_number_of_ranks() -> None:
    options, _ = checked_options(UpFlags(tensor_parallel=2))
    assert options.tensor_parallel == 2
