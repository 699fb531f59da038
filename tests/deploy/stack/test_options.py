"""deploy/local/stack/options.py: workers of one role, which need a fleet that has the other."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from deploy.local.stack.options import checked_options, takes_turns
from deploy.local.usage import UpFlags
from shared.errors import ConfigError


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


def test_one_address_is_not_a_fleet(address: str) -> None:
    for flags in (UpFlags(prefill=1, etcd=address), UpFlags(prefill=1, nats=f"nats://{address}")):
        with pytest.raises(ConfigError, match="to join a fleet that has the other role, give its --nats and --etcd"):
            checked_options(flags)


def test_of_two_vllms_on_a_cpu_the_second_starts_when_the_first_serves_unless_two_were_asked_for() -> None:
    assert takes_turns(UpFlags(engine="vllm"), roles=False, on_gpus=False)
    assert not takes_turns(UpFlags(engine="vllm", workers=2), roles=False, on_gpus=False)
    assert not takes_turns(UpFlags(engine="vllm"), roles=True, on_gpus=False)
    assert not takes_turns(UpFlags(engine="vllm"), roles=False, on_gpus=True)
    assert not takes_turns(UpFlags(), roles=False, on_gpus=False)
