"""deploy/local/stack/block_store.py: how large a block store `up` makes, and whether it goes on without one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.stack.block_store import MEMORY, block_store, parse_size, pool_directory, private_pool, store_request
from deploy.local.stack.stack import BlockStoreOptions
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
HOLDS = """
import sys
from pathlib import Path
from deploy.local.stack.block_store import private_pool
with private_pool(Path(sys.argv[1])) as directory:
    (directory / "pool").write_bytes(b"blocks")
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        ("0", 0),
        ("7", 7),
        ("2K", 2048),
        ("512m", 512 << 20),
        (" 2G", 2 << 30),
        ("1T", 1 << 40),
        ("1GiB", 1 << 30),
        ("2gb", 2 << 30),
        ("3Mi", 3 << 20),
        ("7B", 7),
    ],
)
def test_sizes_are_counted_in_powers_of_1024(size: str, size_bytes: int) -> None:
    assert parse_size(size, "--kvbm-bytes") == size_bytes


@pytest.mark.parametrize("size", ["", "-1", "1.5G", "1IB", "1GX", "G", "GiB", "1e9", "9" * 16])
def test_what_is_no_size_is_refused_by_the_flags_name(size: str) -> None:
    with pytest.raises(ConfigError, match=f"--kvbm-disk-bytes {size}: not a size"):
        parse_size(size, "--kvbm-disk-bytes")


def test_workers_with_roles_have_a_store_whatever_their_engine_and_need_it() -> None:
    store = store_request("", None, "", engine="simulated", needed=True)
    assert (store.pool_bytes, store.needed) == (store_request("", None, "", engine="native").pool_bytes, True)


def test_the_default_is_modest_and_not_required() -> None:
    default = store_request("", None, "", engine="native")
    assert 0 < default.pool_bytes <= 1 << 30
    assert not default.needed


def test_with_gpus_the_default_is_larger() -> None:
    on_cpu, on_gpus = (store_request("", None, "", engine="native", device=device) for device in ("cpu", "cuda"))
    assert on_cpu.pool_bytes < on_gpus.pool_bytes <= 32 << 30
    assert not on_gpus.needed
    assert store_request("1G", None, "", engine="native", device="cuda").pool_bytes == 1 << 30


def test_a_size_or_a_disk_is_an_explicit_request() -> None:
    assert store_request("64M", None, "", engine="simulated") == BlockStoreOptions("", 64 << 20, "", 10 << 30)
    with_disk = store_request("", Path("/blocks"), "1G", engine="native")
    assert (with_disk.disk, with_disk.disk_bytes, with_disk.needed) == ("/blocks", 1 << 30, True)


def test_zero_is_none_and_only_real_blocks_have_one_unasked() -> None:
    assert store_request("0", None, "", engine="native").pool_bytes == 0
    assert store_request("", None, "", engine="simulated").pool_bytes == 0
    assert store_request("", None, "", engine="echo").pool_bytes == 0
    assert store_request("0", None, "", engine="echo").pool_bytes == 0


def test_the_size_of_a_disk_that_is_not_given_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a --kvbm-disk"):
        store_request("1G", None, "10G", engine="native")


def test_its_directory_is_there_as_long_as_it_runs(tmp_path: Path) -> None:
    disk = tmp_path / "blocks"
    with block_store(BlockStoreOptions("", 1 << 20, str(disk), 1 << 30, needed=True), pytest.fail, tmp_path) as store:
        assert store is not None
        assert Path(store.pool).is_dir()
        assert store == BlockStoreOptions(store.pool, 1 << 20, str(disk), 1 << 30, needed=True)
    assert not Path(store.pool).exists()
    assert disk.stat().st_mode & 0o777 == 0o700


def test_a_disk_whose_directory_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (tmp_path / "file").touch()
    for disk, reason in (
        (tmp_path / "none" / "blocks", "No such file or directory"),
        (tmp_path / "file", "is not a directory"),
        (shared, "no other user may open it: .* mode 0755"),
    ):
        wanted = BlockStoreOptions("", 1 << 20, str(disk), 1 << 30, needed=True)
        with (
            pytest.raises(ConfigError, match=f"--kvbm-disk {disk}.*{reason}"),
            block_store(wanted, pytest.fail, tmp_path),
        ):
            pass


def test_none_is_made_where_none_is_wanted(tmp_path: Path) -> None:
    with block_store(BlockStoreOptions("", 0, "", 0, needed=False), pytest.fail, tmp_path) as store:
        assert store is None
        assert list(tmp_path.iterdir()) == []


def test_on_a_machine_without_memory_it_is_left_out_with_a_notice(tmp_path: Path) -> None:
    notices: list[str] = []
    with block_store(BlockStoreOptions("", 1 << 20, "", 0, needed=False), notices.append, tmp_path / "none") as store:
        assert store is None
    (said,) = notices
    assert said.startswith("without kvbm: no memory for a block store: ")


def test_on_a_machine_without_memory_a_requested_store_is_an_error(tmp_path: Path) -> None:
    wanted = BlockStoreOptions("", 1 << 20, "", 0, needed=True)
    with (
        pytest.raises(ConfigError, match="no memory for a block store"),
        block_store(wanted, pytest.fail, tmp_path / "none"),
    ):
        pass


def holder(memory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another `up`, as far as its directory goes."""
    command = [sys.executable, "-c", HOLDS, str(memory)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def test_it_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with private_pool(tmp_path) as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.parent == tmp_path
        assert directory.name.startswith(f"headrace-{os.geteuid()}-")
        (directory / "owners").mkdir()
        (directory / "owners" / "engine").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_after_a_failure_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), private_pool(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_one_with_a_name_goes_on_with_what_its_predecessor_left(tmp_path: Path) -> None:
    left = pool_directory("mine", tmp_path)
    left.mkdir(mode=0o700)
    (left / "pool").write_bytes(b"blocks")
    with private_pool(tmp_path, "mine") as ours:
        assert ours == left
        assert (ours / "pool").read_bytes() == b"blocks"
    assert list(tmp_path.iterdir()) == []


def test_one_with_a_name_that_another_process_uses_is_refused(tmp_path: Path) -> None:
    other, theirs = holder(tmp_path)
    try:
        name = theirs.name.removeprefix(f"headrace-{os.geteuid()}-")
        refused = pytest.raises(ConfigError, match=f"no memory for a block store: {theirs}: another process uses it")
        with refused, private_pool(tmp_path, name):
            pass
        assert (theirs / "pool").exists()
    finally:
        end(other)


def test_one_with_a_name_that_others_may_open_is_refused(tmp_path: Path) -> None:
    pool_directory("mine", tmp_path).mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mine must belong to this user"), private_pool(tmp_path, "mine"):
        pass


def test_two_at_once_have_one_each(tmp_path: Path) -> None:
    other, theirs = holder(tmp_path)
    try:
        with private_pool(tmp_path) as ours:
            assert ours != theirs
            assert (theirs / "pool").read_bytes() == b"blocks"
        assert list(tmp_path.iterdir()) == [theirs]
    finally:
        end(other)


def test_what_a_killed_one_left_is_swept_by_the_next(tmp_path: Path) -> None:
    killed, left = holder(tmp_path)
    end(killed)
    assert (left / "pool").exists()
    with private_pool(tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours]


def test_what_only_looks_like_one_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")
    (tmp_path / f"headrace-{os.geteuid()}-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"headrace-{os.geteuid()}-file").write_text("")
    (tmp_path / f"headrace-{os.geteuid() + 1}-other").mkdir()
    with private_pool(tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_no_such_memory_is_said_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"no memory for a block store: .*none.*: No such file or directory"),
        private_pool(tmp_path / "none"),
    ):
        pass


def test_the_default_is_memory_indeed() -> None:
    assert os.major(MEMORY.stat().st_dev) == 0
