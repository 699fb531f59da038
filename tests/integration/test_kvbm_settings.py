"""Settings of kvbm and of its workers that cannot be meant: who cannot start says why and ends with 2, who can serve
does, and says why it exchanges no blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.kvbm.pool.host_pool import HostPool
from shared.pool.lock import hold_owner
from tests.integration.fleet import fleet
from tests.integration.machine import Machine, connected, eventually, prompt, refusal
from tests.kvbm.small_tmpfs import small_tmpfs
from tests.tiny_model import write_tiny_model

SOMEBODY = 65534
"""Another user than the one who runs the tests."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With directories and files that are no good for a pool."""
    (tmp_path / "file").touch()
    (tmp_path / "everybodys").mkdir()
    (tmp_path / "everybodys").chmod(0o777)
    if os.geteuid() == 0:
        (tmp_path / "foreign").mkdir(mode=0o700)
        os.chown(tmp_path / "foreign", SOMEBODY, SOMEBODY)
    else:
        (tmp_path / "foreign").symlink_to("/")
    return tmp_path


@pytest.mark.parametrize(
    ("pool", "size_bytes", "more", "words"),
    [
        ("pool", 1 << 45, (), "a pool of 32768.0 GiB needs 32768.0 GiB, and this machine's memory is"),
        ("pool", 1 << 50, (), "1125899906842624 bytes: a pool has from 131072 to 70368744177664"),
        ("file/pool", 1 << 20, (), "file/pool: Not a directory"),
        ("file", 1 << 20, (), "file: File exists"),
        ("everybodys", 1 << 20, (), "must belong to this user, and no other user may write to it"),
        ("foreign", 1 << 20, (), "must belong to this user, and no other user may write to it"),
        ("pool", 1, (), "0 bytes: a pool has from 131072"),
        ("pool", 1 << 20, ("--tiers-host-policy", "best"), "eviction policy best"),
        ("pool", 1 << 20, ("--tiers-disk-policy", "nowhere:Policy"), "eviction policy nowhere:Policy"),
    ],
)
def test_a_kvbm_that_cannot_start_says_why(
    folder: Path, nats_url: str, pool: str, size_bytes: int, more: tuple[str, ...], words: str
) -> None:
    flags = ("--pool-directory", str(folder / pool), "--pool-size-bytes", str(size_bytes))
    told = refusal("kvbm", nats_url, folder, *flags, *more)
    assert told.startswith("headrace-kvbm: ")
    assert words in told


def test_a_kvbm_of_another_size_makes_a_new_pool_and_leaves_the_former_one_to_engines_that_live(
    folder: Path, nats_url: str
) -> None:
    HostPool.open(folder / "pool", 1 << 20).close()
    former = (folder / "pool" / "pool").open("rb")
    lock = hold_owner(folder / "pool", "engine")
    with former, fleet(folder, nats_url, *Machine.where(folder)) as processes:
        Machine(processes, folder, folder, 2 << 20).start_kvbm()
        processes.wait_ready()
        assert (folder / "pool" / "pool").stat().st_size == 2 << 20
        assert os.fstat(former.fileno()).st_size == 1 << 20
    lock.close(delete=True)


def test_a_pool_is_not_larger_than_its_file_system(tmp_path: Path, nats_url: str) -> None:
    with small_tmpfs(tmp_path / "small") as small:
        flags = ("--pool-directory", str(small / "pool"), "--pool-size-bytes", str(4 << 20))
        told = refusal("kvbm", nats_url, tmp_path, *flags)
        assert f"a pool of 4.0 MiB needs 4.0 MiB, and the free space of {small}/pool is" in told
        assert not (small / "pool" / "pool").exists()


def test_an_engine_without_blocks_does_not_start_with_a_pool(tmp_path: Path, nats_url: str) -> None:
    model = ("--model", str(write_tiny_model(tmp_path / "tiny")), "--engine", "echo")
    told = refusal("worker", nats_url, tmp_path, *model, "--kvbm-pool", str(tmp_path / "pool"))
    assert told == (
        "headrace-worker: kvbm.pool is set, but the echo engine has no KV to exchange: "
        "empty it, or choose another engine"
    )


async def test_a_worker_whose_pool_is_none_serves_and_says_why_it_exchanges_nothing(
    folder: Path, nats_url: str
) -> None:
    pools = {
        "missing": "missing: start a kvbm with that pool.directory, or correct kvbm.pool",
        "file": "file is not a directory",
        "foreign": "must belong to this user, and no other user may write to it",
        "everybodys": "must belong to this user, and no other user may write to it",
    }
    asked = prompt(100, "any")
    with fleet(folder, nats_url, *Machine.where(folder)) as processes:
        model = write_tiny_model(folder / "tiny")
        machine = Machine(processes, folder, model, 0, "--engine", "simulated", "--simulated-context-length", "2048")
        for pool in pools:
            machine.start_worker(pool, pool=folder / pool)
        processes.wait_ready()
        async with connected(machine, nats_url) as wire:
            for pool, words in pools.items():
                assert (await wire.ask(pool, asked)).cached == 0

                async def told(pool: str = pool, words: str = words) -> bool:
                    lines = machine.process(pool).log.read_text().splitlines()
                    return any("no blocks are exchanged: " in line and words in line for line in lines)

                await eventually(told, f"{pool} says why")
