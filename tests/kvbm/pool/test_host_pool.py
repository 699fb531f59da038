"""The pool file: made, adopted, replaced, refused. Real files, real processes, SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.kvbm.pool.arenas import NoArena
from services.kvbm.pool.host_pool import HostPool, check_memory
from services.kvbm.pool.prefault import make_memory
from shared.errors import ConfigError
from shared.pool.format import PoolGeometry, PoolUnfit
from shared.pool.lock import hold_owner
from shared.pool.map import PoolMap
from tests.kvbm.processes import OWNER, ended, running
from tests.kvbm.small_tmpfs import small_tmpfs

SIZE_BYTES = 1 << 20

KVBM = """
import sys
from pathlib import Path
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.prefault import make_memory
pool = HostPool.open(Path(sys.argv[1]), 1 << 20)
slots = pool.assign_arena("layout", 4096, ()).slots
for _ in range(3):
    slots.grant(5)
slots.bytes[0] = 7
print(pool.adopted, slots.generation(5), flush=True)
sys.stdin.read()
"""


REMAKING = """
import sys
from itertools import cycle
from pathlib import Path
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.prefault import make_memory
for size in cycle((1 << 20, 2 << 20)):
    pool = HostPool.open(Path(sys.argv[1]), size)
    assert not pool.adopted
    pool.close()
    print("made", flush=True)
"""


@contextmanager
def opened(directory: Path, size_bytes: int = SIZE_BYTES, arenas: int = 1) -> Iterator[HostPool]:
    pool = HostPool.open(directory, size_bytes, arenas)
    try:
        yield pool
    finally:
        pool.close()


def inode(directory: Path) -> int:
    return (directory / "pool").stat().st_ino


def test_a_new_pool_is_this_users_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    with opened(directory, SIZE_BYTES + 17) as pool:
        assert not pool.adopted
        assert pool.survivors == frozenset()
        about = pool.path.stat()
        assert about.st_size == SIZE_BYTES
        assert about.st_mode & 0o777 == 0o600
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {file.name for file in directory.iterdir()} == {"lock", "owners", "pool"}


def test_a_second_kvbm_is_refused_and_the_error_names_the_first_process(tmp_path: Path) -> None:
    with running(KVBM, tmp_path) as (process, _):
        with pytest.raises(ConfigError, match=f"another kvbm runs here, process {process.pid}"):
            HostPool.open(tmp_path, SIZE_BYTES)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(ConfigError, match="another kvbm"):
            HostPool.open(tmp_path, SIZE_BYTES)
        ended(process)
        with opened(tmp_path) as pool:
            assert pool.adopted


def test_after_a_kill_the_same_memory_is_adopted_and_generations_go_on(tmp_path: Path) -> None:
    files: set[int] = set()
    for run in range(4):
        with running(KVBM, tmp_path) as (process, line):
            assert line == f"{run > 0} {3 * run + 3}"
            files.add(inode(tmp_path))
            ended(process)
    with opened(tmp_path) as pool:
        assert files == {inode(tmp_path)}
        assert pool.assign_arena("layout", 4096, ()).slots.grant(5) == 13


def test_an_engine_sees_through_its_old_mapping_what_the_next_kvbm_grants(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        arena = pool.assign_arena("layout", 4096, ()).slots.arena
    lock = hold_owner(tmp_path, "w-1")
    mapped = PoolMap(tmp_path / "pool")
    slots = mapped.arena(arena)
    with opened(tmp_path) as pool:
        assert pool.survivors == {"w-1"}
        granted = pool.assign_arena("layout", 4096, ()).slots.grant(0)
        assert slots.generation(0) == granted == 1
        assert mapped.current
    slots.close()
    mapped.close()
    lock.close(delete=True)


def version_2() -> bytes:
    header = bytearray(PoolGeometry.of(SIZE_BYTES).header())
    header[8] = 2
    return bytes(header)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (version_2(), "a pool of version 2"),
        (PoolGeometry.of(2 * SIZE_BYTES).header(), "a pool of 2097152 bytes in a file of 1048576"),
        (bytes(64), "not a pool"),
        (PoolGeometry.of(SIZE_BYTES).header()[:16] + bytes(48), "a pool of 0 bytes"),
    ],
)
def test_an_unfit_file_gets_a_new_one_in_its_place_and_is_left_to_the_engines_that_map_it(
    tmp_path: Path, header: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as pool:
        arena = pool.assign_arena("layout", 4096, ()).slots.arena
    before = inode(tmp_path)
    with running(OWNER, tmp_path, "worker-1") as (process, _):
        mapped = PoolMap(tmp_path / "pool")
        slots = mapped.arena(arena)
        with (tmp_path / "pool").open("r+b") as file:
            file.write(header)
        process.send_signal(signal.SIGSTOP)
        with opened(tmp_path) as pool:
            assert not pool.adopted
            assert pool.survivors == frozenset(), "of the new file no engine has a mapping"
            assert inode(tmp_path) != before
            assert not mapped.current
            fresh = pool.assign_arena("layout", 4096, ()).slots
            slots.bytes[:] = b"\x01" * len(slots.bytes)
            fresh.grant(0)
            assert not any(fresh.bytes)
            assert slots.generation(0) == 0
        assert said in caplog.text
        slots.close()
        mapped.close()
        ended(process)


def test_a_file_of_another_size_gets_a_new_one_in_its_place_though_engines_live(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    lock = hold_owner(tmp_path, "w-1")
    with opened(tmp_path, 2 * SIZE_BYTES) as pool:
        assert not pool.adopted
        assert pool.path.stat().st_size == 2 * SIZE_BYTES
        assert pool.owners.watched == {"w-1"}
    lock.close()


def test_where_there_is_no_room_for_a_new_file_while_engines_live_the_start_is_refused_by_name(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as directory:
        with opened(directory) as pool, pool.path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE_BYTES)
        lock = hold_owner(directory, "w-1")
        before = inode(directory)
        (directory / "pool").chmod(0o666)
        with pytest.raises(
            ConfigError,
            match=r"no other user may open it: .* mode 0666; no room for a new one while .* live: w-1: a pool",
        ):
            HostPool.open(directory, SIZE_BYTES)
        assert inode(directory) == before
        lock.close()
        with opened(directory) as pool:
            assert not pool.adopted


def test_a_pool_that_others_could_have_written_to_is_not_adopted(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / "pool").chmod(0o666)
    with opened(tmp_path) as pool:
        assert not pool.adopted
        assert pool.path.stat().st_mode & 0o777 == 0o600


def test_a_link_in_the_pools_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    (directory / "pool").symlink_to(elsewhere)
    (directory / "pool.new").symlink_to(elsewhere)
    with opened(directory) as pool:
        assert not pool.path.is_symlink()
    assert elsewhere.read_bytes() == b"mine"


def test_a_start_that_was_killed_half_way_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "pool.new").write_bytes(b"half")
    with opened(tmp_path):
        assert {file.name for file in tmp_path.iterdir()} == {"lock", "owners", "pool"}


def test_a_kvbm_killed_at_any_instant_of_its_start_leaves_a_pool_that_the_next_one_opens(tmp_path: Path) -> None:
    for lines in (1, 2, 3, 5, 8):
        (tmp_path / "pool").unlink(missing_ok=True)
        with running(REMAKING, tmp_path) as (process, _):
            assert process.stdout is not None
            for _line in range(lines):
                assert process.stdout.readline() == b"made\n"
            ended(process)  # somewhere within one of the next
        PoolMap(tmp_path / "pool").close()
        with opened(tmp_path) as pool:
            assert pool.assign_arena("layout", 4096, ()).slots.grant(0) == 1


@pytest.mark.parametrize("size_bytes", [-1, 0, 1000, 1 << 50])
def test_a_size_that_no_pool_has_is_refused_before_anything_is_made(tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(ConfigError, match="a pool has from"):
        HostPool.open(tmp_path / "d", size_bytes)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(("arenas", "said"), [(0, "pool.arenas is 0"), (1000, "larger than an arena of 0")])
def test_as_many_arenas_as_a_pool_cannot_have_are_refused(tmp_path: Path, arenas: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HostPool.open(tmp_path / "d", SIZE_BYTES, arenas)
    assert not (tmp_path / "d").exists()


def test_a_pool_larger_than_the_machine_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this machine's memory is"):
        HostPool.open(tmp_path, 1 << 45)
    assert not (tmp_path / "pool").exists()
    with opened(tmp_path):
        pass


def test_a_pool_larger_than_its_file_system_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as directory:
        with pytest.raises(ConfigError, match=f"needs 4.0 MiB, and the free space of {directory} is 2.0 MiB"):
            HostPool.open(directory, 4 * SIZE_BYTES)
        assert not (directory / "pool").exists()
        with opened(directory) as pool:
            assert pool.path.exists()


def test_a_directory_that_others_can_change_or_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="no other user may write to it"):
        HostPool.open(shared, SIZE_BYTES)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        HostPool.open(tmp_path / "file" / "d", SIZE_BYTES)
    (tmp_path / "d" / "pool").mkdir(parents=True)
    with pytest.raises(ConfigError, match="Is a directory"):
        HostPool.open(tmp_path / "d", SIZE_BYTES)


def test_a_start_that_fails_lets_go_of_all_it_had(tmp_path: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with opened(tmp_path):
        pass
    lock = hold_owner(tmp_path, "w-1")
    with pytest.raises(ConfigError):
        HostPool.open(tmp_path, 1 << 45)
    lock.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    with opened(tmp_path, 2 * SIZE_BYTES):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_layouts_have_slots_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path, arenas=2) as pool:
        first = pool.assign_arena("a", 4096, ())
        second = pool.assign_arena("b", 70_000, ["a"])
        assert second.slots.arena.slot_bytes == 73_728
        assert pool.assign_arena("a", 4096, ["a", "b"]) == first
        first.slots.bytes[:] = b"\x01" * len(first.slots.bytes)
        assert not any(second.slots.bytes)
        with pytest.raises(NoArena):
            pool.assign_arena("c", 4096, ["a", "b"])
        first.slots.grant(0)
        third = pool.assign_arena("c", 8192, ["b"])
        assert third.former_layout == "a"
        assert third.slots.arena.offset == first.slots.arena.offset
        assert third.slots.generation(0) == 1
        assert pool.assign_arena("a", 4096, ["c"]).former_layout == "b"


def test_a_block_that_no_arena_has_room_for_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        pool.assign_arena("a", 4096, ())
        with pytest.raises(PoolUnfit, match="larger than an arena"):
            pool.assign_arena("b", SIZE_BYTES, ())
        with pytest.raises(PoolUnfit, match="slots of 4096 bytes, not 8192"):
            pool.assign_arena("a", 8000, ())
        assert pool.arenas.layouts == ["a"]


def test_an_arena_that_cannot_be_mapped_stays_with_the_layout_that_had_it(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", arenas=2) as pool:
        first = pool.assign_arena("a", 4096, ()).slots
        second = pool.assign_arena("b", 4096, ()).slots
        os.truncate(pool.path, 1 << 16)
        with pytest.raises(PoolUnfit, match="cannot be mapped"):
            pool.assign_arena("c", 4096, ())
        os.truncate(pool.path, SIZE_BYTES)
        assert pool.arenas.layouts == ["a", "b"]
        assert pool.assign_arena("a", 4096, ()).slots is first
        assert pool.assign_arena("b", 4096, ()).slots is second
        assert pool.assign_arena("c", 4096, ()).former_layout == "a"


def test_memory_is_reserved_by_prefaulting_and_stays_so_for_the_next_kvbm(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        assert not pool.reserved
        make_memory(pool.descriptor, 0, SIZE_BYTES)
        assert pool.reserved
    with opened(tmp_path) as pool:
        assert pool.adopted
        assert pool.reserved


def test_a_directory_that_depends_on_where_kvbm_was_started_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        HostPool.open(Path("pool"), 1 << 20)


def test_a_small_pool_has_room(tmp_path: Path) -> None:
    check_memory(tmp_path, 1 << 20, 0)


def test_a_pool_larger_than_the_memory_is_refused_even_where_it_is_there(tmp_path: Path) -> None:
    for there_bytes in (0, 1 << 46):
        with pytest.raises(ConfigError, match=r"needs 65536.0 GiB, and this machine's memory is \d+\.\d GiB"):
            check_memory(tmp_path, 1 << 46, there_bytes)


def test_only_what_is_not_there_yet_needs_free_space(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as directory:
        check_memory(directory, 6 << 20, 5 << 20)
        with pytest.raises(ConfigError, match=f"of 6.0 MiB needs 3.0 MiB, and the free space of {directory} is 2.0"):
            check_memory(directory, 6 << 20, 3 << 20)
