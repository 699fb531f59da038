from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from services.kvbm.pool.host_pool import HostPool
from services.worker.kv_connector.pool_attachment import OwnerName, PoolAttachment
from shared.messages.kvbm import Attached
from shared.pool.format import PoolUnfit

POOL_BYTES = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[HostPool]:
    pool = HostPool.open(tmp_path / "pool", POOL_BYTES)
    yield pool
    pool.close()


@pytest.fixture
def attachment(pool: HostPool) -> Iterator[PoolAttachment]:
    attachment = PoolAttachment(pool.path.parent, "w1")
    yield attachment
    attachment.close()


def attached(pool: HostPool, layout: str = "layout", block_bytes: int = 5000) -> Attached:
    arena = pool.assign_arena(layout, block_bytes, ()).slots.arena
    return Attached(
        kvbm="k1",
        layout=layout,
        pool_bytes=pool.geometry.file_bytes,
        offset=arena.offset,
        slot_bytes=arena.slot_bytes,
        slots=arena.slots,
        generations=arena.generations,
        blocks_per_request=64,
    )


def test_one_name_is_held_until_it_is_closed(pool: HostPool, attachment: PoolAttachment) -> None:
    owner = attachment.hold()
    assert owner.startswith("w1-")
    assert attachment.hold() == owner
    assert pool.owners.is_alive(owner)
    attachment.close()
    assert not pool.owners.is_alive(owner)
    assert not list((pool.path.parent / "owners").iterdir())


def test_the_lock_stays_at_the_descriptor_it_was_given_also_when_its_file_was_deleted(pool: HostPool) -> None:
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    with closing(PoolAttachment(pool.path.parent, "w1", number)) as attachment:
        first = attachment.hold()
        file = pool.path.parent / "owners" / first
        assert pool.owners.is_alive(first)
        file.unlink()
        second = attachment.hold()
        assert not pool.owners.is_alive(first)
        assert pool.owners.is_alive(second)
        assert os.path.samestat(os.fstat(number), (file.parent / second).stat())


def test_a_shared_lock_is_free_when_the_last_one_has_released_it(pool: HostPool) -> None:
    one, rank = OwnerName(pool.path.parent, "w1", shared=True), OwnerName(pool.path.parent, "")
    owner = one.hold()
    rank.join(owner)
    one.release()
    assert pool.owners.is_alive(owner)
    rank.release()
    assert not pool.owners.is_alive(owner)
    with pytest.raises(PoolUnfit, match=owner):
        rank.join(owner)


def test_locks_that_are_joined_one_after_the_other_keep_the_descriptor(pool: HostPool) -> None:
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    rank = OwnerName(pool.path.parent, "", number)
    names = [OwnerName(pool.path.parent, "w1", shared=True) for _ in range(2)]
    for name in names:
        owner = name.hold()
        rank.join(owner)
        name.release()
        assert pool.owners.is_alive(owner)
        assert os.path.samestat(os.fstat(number), (pool.path.parent / "owners" / owner).stat())
    rank.release()
    assert not pool.owners.is_alive(owner)


def test_two_engine_processes_of_one_worker_have_two_names(pool: HostPool, attachment: PoolAttachment) -> None:
    other = PoolAttachment(pool.path.parent, "w1")
    assert other.hold() != attachment.hold()
    other.close()


def test_a_lock_whose_file_was_deleted_is_let_go_and_another_one_is_held(
    pool: HostPool, attachment: PoolAttachment
) -> None:
    before = attachment.hold()
    assert pool.owners.is_alive(before)
    (pool.path.parent / "owners" / before).unlink()
    after = attachment.hold()
    assert after != before
    assert pool.owners.poll() == [before]
    assert pool.owners.is_alive(after)


def test_the_slots_are_the_kvbm_s(pool: HostPool, attachment: PoolAttachment) -> None:
    told = attached(pool)
    slots = attachment.map(told)
    theirs = pool.assign_arena("layout", 5000, ()).slots
    theirs.grant(3)
    theirs.bytes[3 * told.slot_bytes] = 77
    assert slots.generation(3) == 1
    assert slots.bytes[3 * told.slot_bytes] == 77


def test_what_is_mapped_already_is_not_mapped_again(pool: HostPool, attachment: PoolAttachment) -> None:
    told = attached(pool)
    assert attachment.map(told) is attachment.map(told)


def test_another_place_is_mapped_again(pool: HostPool, attachment: PoolAttachment) -> None:
    told = attached(pool)
    before = attachment.map(told)
    after = attachment.map(msgspec.structs.replace(told, slots=told.slots - 1))
    assert after is not before
    assert after.arena.slots == told.slots - 1


def test_another_file_under_the_same_name_is_mapped_again(pool: HostPool, attachment: PoolAttachment) -> None:
    told = attached(pool)
    before = attachment.map(told)
    aside = pool.path.with_name("aside")
    aside.write_bytes(pool.path.read_bytes())
    aside.chmod(0o600)
    aside.replace(pool.path)
    after = attachment.map(told)
    assert after is not before
    after.bytes[0] = 5
    assert pool.path.read_bytes()[told.offset] == 5


def test_a_pool_of_another_size_than_kvbm_named_is_refused(pool: HostPool, attachment: PoolAttachment) -> None:
    told = msgspec.structs.replace(attached(pool), pool_bytes=2 * POOL_BYTES)
    with pytest.raises(PoolUnfit, match=f"{POOL_BYTES} bytes, not the {2 * POOL_BYTES} of kvbm"):
        attachment.map(told)


def test_a_place_outside_of_the_file_is_refused_and_the_right_one_is_mapped_afterwards(
    pool: HostPool, attachment: PoolAttachment
) -> None:
    told = attached(pool)
    attachment.map(told)
    with pytest.raises(PoolUnfit, match="does not lie in a pool"):
        attachment.map(msgspec.structs.replace(told, slots=told.slots * 2))
    assert attachment.map(told).arena.slots == told.slots


def test_a_pool_that_has_gone_is_named(pool: HostPool, attachment: PoolAttachment) -> None:
    told = attached(pool)
    attachment.map(told)
    pool.path.unlink()
    with pytest.raises(PoolUnfit, match="pool"):
        attachment.map(told)


def test_a_directory_without_a_kvbm_is_named(tmp_path: Path) -> None:
    attachment = PoolAttachment(tmp_path / "nowhere", "w1")
    with pytest.raises(PoolUnfit, match="nowhere"):
        attachment.hold()
    attachment.close()
