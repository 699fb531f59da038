"""The pool in memory: what is mapped, what is refused, what a child does not inherit."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest

from shared.pool.format import HEADER_BYTES, PAGE_BYTES, Arena, PoolGeometry, PoolUnfit
from shared.pool.map import ArenaMap, PoolMap, touch
from tests.kvbm.processes import running
from tests.kvbm.small_tmpfs import small_tmpfs

SIZE_BYTES = 1 << 20
GEOMETRY = PoolGeometry.of(SIZE_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "pool"
    file.touch(0o600)
    os.truncate(file, SIZE_BYTES)
    with file.open("r+b") as opened:
        opened.write(GEOMETRY.header())
    return file


@pytest.fixture
def kvbm(path: Path) -> Iterator[ArenaMap]:
    pool = PoolMap(path, grants=True)
    slots = pool.arena(GEOMETRY.arena(1, 2, 5000))
    yield slots
    slots.close()
    pool.close()


@pytest.fixture
def engine(path: Path) -> Iterator[ArenaMap]:
    pool = PoolMap(path)
    slots = pool.arena(GEOMETRY.arena(1, 2, 5000))
    yield slots
    slots.close()
    pool.close()


def test_what_one_writes_to_a_slot_the_other_reads(kvbm: ArenaMap, engine: ArenaMap, path: Path) -> None:
    for slot in range(engine.arena.slots):
        with engine.slot(slot) as written:
            assert len(written) == 8192
            written[:] = bytes([slot]) * 8192
    for slot in range(engine.arena.slots):
        with kvbm.slot(slot) as read:
            assert read == bytes([slot]) * 8192
    start = GEOMETRY.arena(1, 2, 5000).offset
    assert path.read_bytes()[start + 8192 : start + 2 * 8192] == b"\x01" * 8192


def test_slots_begin_at_whole_pages_as_direct_reads_and_writes_need_them(engine: ArenaMap) -> None:
    for slot in range(engine.arena.slots):
        with engine.slot(slot) as memory:
            assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE_BYTES == 0


def test_a_grant_is_seen_by_all_and_by_one_slot_alone(kvbm: ArenaMap, engine: ArenaMap) -> None:
    assert [kvbm.grant(3), kvbm.grant(3), kvbm.grant(4)] == [1, 2, 1]
    assert [engine.generation(slot) for slot in range(6)] == [0, 0, 0, 2, 1, 0]


def test_generations_outlive_their_writer_and_start_again_after_the_last(path: Path) -> None:
    arena = GEOMETRY.arena(0, 1, 4096)
    with path.open("r+b") as file:
        file.seek(arena.generations)
        file.write(b"\xff" * 8)
    for expected in (0, 1):
        pool = PoolMap(path, grants=True)
        slots = pool.arena(arena)
        assert slots.grant(0) == expected
        slots.close()
        pool.close()


def test_generations_of_many_slots_are_read_at_once(kvbm: ArenaMap, engine: ArenaMap) -> None:
    for slot in (3, 3, 4):
        kvbm.grant(slot)
    packed = b"".join(slot.to_bytes(4, "little") for slot in (4, 0, 3))
    assert engine.generations(packed) == b"".join(number.to_bytes(8, "little") for number in (1, 0, 2))
    assert engine.generations(b"") == b""
    with pytest.raises(PoolUnfit, match=f"slot {engine.arena.slots} of an arena of {engine.arena.slots}"):
        engine.generations(engine.arena.slots.to_bytes(4, "little"))


def test_an_engine_cannot_write_generations(engine: ArenaMap) -> None:
    with pytest.raises(TypeError, match="read-only"):
        engine.grant(0)


def test_a_slot_that_is_not_there_is_refused(kvbm: ArenaMap) -> None:
    for slot in (-1, kvbm.arena.slots, 1 << 40):
        with pytest.raises(PoolUnfit, match=f"slot {slot} of an arena"):
            kvbm.slot(slot)
        with pytest.raises(PoolUnfit):
            kvbm.generation(slot)
        with pytest.raises(PoolUnfit):
            kvbm.grant(slot)


def test_a_place_outside_the_file_is_not_mapped(path: Path) -> None:
    pool = PoolMap(path)
    for arena in (Arena(GEOMETRY.slots_at, 4096, 1 << 20, 4096), Arena(0, 4096, 1, 4096)):
        with pytest.raises(PoolUnfit, match="does not lie"):
            pool.arena(arena)
    pool.close()


def test_touching_changes_nothing_and_leaves_no_view(engine: ArenaMap) -> None:
    with engine.slot(2) as slot:
        slot[:5] = b"stays"
    touch(engine.bytes)
    assert bytes(engine.bytes[2 * 8192 : 2 * 8192 + 6]) == b"stays\0"


def test_touching_what_the_file_system_has_no_room_for_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as directory:
        file = directory / "pool"
        file.touch(0o600)
        os.truncate(file, 4 * SIZE_BYTES)
        with file.open("r+b") as opened:
            opened.write(PoolGeometry.of(4 * SIZE_BYTES).header())
        pool = PoolMap(file)
        slots = pool.arena(pool.geometry.arena(0, 1, 4096))
        with pytest.raises(OSError, match="Bad address"):
            touch(slots.bytes)
        slots.close()
        pool.close()


def test_a_view_that_is_kept_keeps_the_memory(path: Path) -> None:
    pool = PoolMap(path)
    slots = pool.arena(GEOMETRY.arena(0, 1, 4096))
    kept = slots.slot(0)
    with pytest.raises(BufferError):
        slots.close()
    kept[0] = 1
    kept.release()
    slots.close()
    pool.close()


def test_it_is_seen_that_the_file_was_replaced(path: Path) -> None:
    pool = PoolMap(path)
    assert pool.current
    path.rename(path.with_name("old"))
    assert not pool.current
    path.touch()
    assert not pool.current
    pool.close()


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o666])
def test_a_file_that_others_may_open_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(PoolUnfit, match="no other user may open it"):
        PoolMap(path)


def test_what_is_no_file_is_refused_and_not_waited_for(path: Path) -> None:
    link, pipe = path.with_name("link"), path.with_name("pipe")
    link.symlink_to(path)
    os.mkfifo(pipe, 0o600)
    for wrong in (link, pipe, path.parent, path.with_name("missing")):
        with pytest.raises(PoolUnfit, match=str(wrong)):
            PoolMap(wrong)


def test_a_file_of_another_user_is_refused(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, 12345)
    with pytest.raises(PoolUnfit, match="must belong to this user"):
        PoolMap(path)


def test_a_file_that_was_cut_short_is_refused(path: Path) -> None:
    for size_bytes in (0, 1, HEADER_BYTES, 4096, 1 << 16, SIZE_BYTES - 1):
        os.truncate(path, size_bytes)
        with pytest.raises(PoolUnfit):
            PoolMap(path)


def test_a_header_with_any_wrong_byte_is_refused(path: Path) -> None:
    whole = GEOMETRY.header()
    numbers = random.Random(7)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with path.open("r+b", buffering=0) as file:
        for _ in range(2000):
            torn = bytearray(whole)
            for _ in range(numbers.randint(1, 8)):
                torn[numbers.randrange(HEADER_BYTES)] = numbers.randrange(256)
            os.pwrite(file.fileno(), torn, 0)
            if torn == whole:
                PoolMap(path).close()
                continue
            with pytest.raises(PoolUnfit, match=str(path)):
                PoolMap(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


WRITES = """
import ctypes, sys, threading
from pathlib import Path
from shared.pool.lock import hold_owner
from shared.pool.map import PoolMap
directory = Path(sys.argv[1])
lock = hold_owner(directory, "w-1")
pool = PoolMap(directory / "pool")
slots = pool.arena(pool.geometry.arena(0, 1, 4096))
address = ctypes.addressof(ctypes.c_char.from_buffer(slots.bytes))
def write(first):
    value = first
    while True:
        ctypes.memset(address, value % 256, slots.arena.size_bytes)
        value += 3
for first in range(3):
    threading.Thread(target=write, args=(first,), daemon=True).start()
print("writing", flush=True)
sys.stdin.read()
"""


def test_once_a_killed_engines_lock_is_free_it_writes_no_more(path: Path) -> None:
    (path.parent / "owners").mkdir(mode=0o700)
    pool = PoolMap(path)
    slots = pool.arena(GEOMETRY.arena(0, 1, 4096))
    for _ in range(5):
        with running(WRITES, path.parent) as (process, line), (path.parent / "owners" / "w-1").open() as lock:
            assert line == "writing"
            process.kill()
            fcntl.flock(lock, fcntl.LOCK_EX)
            seen = bytes(slots.bytes)
            process.wait(timeout=180)
            assert seen == slots.bytes
        (path.parent / "owners" / "w-1").unlink()
    slots.close()
    pool.close()


FORKS = """
import os, sys
from pathlib import Path
from shared.pool.format import PoolGeometry
from shared.pool.map import PoolMap
pool = PoolMap(Path(sys.argv[1]))
slots = pool.arena(pool.geometry.arena(0, 1, 4096))
child = os.fork()
if child == 0:
    slots.bytes[0] = 1
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), slots.bytes[0])
"""


def test_a_forked_child_cannot_write_to_the_pool(path: Path) -> None:
    ran = run([sys.executable, "-c", FORKS, path], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "-11 0\n"
