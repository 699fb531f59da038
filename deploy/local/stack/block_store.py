"""The block store of one `up`: its size, from the flags, and its directory in memory while `up` runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from deploy.local.stack.stack import BlockStoreOptions
from shared.errors import ConfigError
from shared.machine_memory import usable_memory_bytes
from shared.private_directory import NoDirectory, private_directory, usual_prefix
from shared.regular_file import ownership_fault

DEFAULTS = {"cpu": (16, 1 << 30), "cuda": (8, 32 << 30)}
"""Device → (divisor of the machine's memory, limit in bytes) of the default size. Without GPUs the default is modest,
so that a laptop does not notice it. With GPUs, whose blocks are larger and more, it is large enough to be useful."""
DISK_BYTES = 10 << 30
"""Default of `--kvbm-disk-bytes`."""
ENGINES_WITH_STORE = ("native",)
"""Engines that have a block store by default."""
ENGINES_WITHOUT_BLOCKS = ("echo", "attached", "diffusers")
"""Engines that compute no blocks, or exchange none with a block store."""
_SIZE = re.compile(r"(\d{1,15})(?:([KMGT])(?:I?B|I)?|B)?")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MEMORY = Path("/dev/shm")  # noqa: S108 every Linux has its tmpfs there; our directory has mode 0700


@contextmanager
def private_pool(memory: Path = MEMORY, name: str = "") -> Iterator[Path]:
    """Yield a private directory for one block store. Raise ConfigError if `memory` cannot be used."""
    try:
        with private_directory(memory, name) as directory:
            yield directory
    except NoDirectory as wrong:
        raise ConfigError(f"no memory for a block store: {wrong}") from None


def pool_directory(name: str, memory: Path = MEMORY) -> Path:
    """Return the directory that `private_pool` yields for a name."""
    return memory / f"{usual_prefix()}{name}"


def store_request(
    size: str, disk: Path | None, disk_size: str, *, engine: str, device: str = "cpu", needed: bool = False
) -> BlockStoreOptions:
    """Return what `--kvbm-bytes`, `--kvbm-disk` and `--kvbm-disk-bytes` ask for (empty or None: not given): a block
    store without a pool yet, of 0 bytes if there is to be none. With `needed` workers cannot do without it. Raise
    ConfigError."""
    if disk_size and disk is None:
        raise ConfigError("--kvbm-disk-bytes needs a --kvbm-disk")
    disk_bytes = parse_size(disk_size, "--kvbm-disk-bytes") if disk_size else DISK_BYTES
    if not size and disk is None:
        with_store = needed or engine in ENGINES_WITH_STORE
        return BlockStoreOptions("", _default_bytes(device) if with_store else 0, needed=needed)
    pool_bytes = parse_size(size, "--kvbm-bytes") if size else _default_bytes(device)
    if pool_bytes == 0 and disk is not None:
        raise ConfigError("--kvbm-disk needs some --kvbm-bytes: blocks get there through memory")
    if pool_bytes and engine in ENGINES_WITHOUT_BLOCKS:
        raise ConfigError(f"--kvbm-bytes: engine {engine} has no blocks to store")
    return BlockStoreOptions("", pool_bytes, "" if disk is None else str(disk.absolute()), disk_bytes)


def parse_size(size: str, flag: str) -> int:
    """Return the bytes of a size such as 512M or 512MiB; K, M, G and T are powers of 1024, KB and KiB the same as K.

    Raise ConfigError that names the flag."""
    match = _SIZE.fullmatch(size.strip().upper())
    if match is None:
        raise ConfigError(f"{flag} {size}: not a size, such as 512M, 2G or 2GiB")
    return int(match[1]) * _UNITS[match[2] or ""]


@contextmanager
def block_store(
    request: BlockStoreOptions, notice: Callable[[str], None], memory: Path = MEMORY
) -> Iterator[BlockStoreOptions | None]:
    """Yield the settings of the block store, whose directory exists until the block ends; None without one.

    If there is no memory for it, a block store that a flag asked for raises ConfigError; a default one is left out with
    a notice. Raise ConfigError too if the disk's directory cannot be used.
    """
    if request.disk:
        _check_disk(Path(request.disk))
    store = None
    with ExitStack() as held:
        try:
            if request.pool_bytes:
                pool = held.enter_context(private_pool(memory))
                store = msgspec.structs.replace(request, pool=str(pool))
        except ConfigError as wrong:
            if request.needed:
                raise
            notice(f"without kvbm: {wrong}")
        yield store


def _check_disk(directory: Path) -> None:
    """Create the directory if it is missing, but not its parents, as kvbm does. Raise ConfigError if it cannot be
    used: later, kvbm would only turn its disk tier off."""
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as wrong:
        raise ConfigError(f"--kvbm-disk {directory}: {wrong.strerror}") from None
    if fault := ownership_fault(found, "directory", "open"):
        raise ConfigError(f"--kvbm-disk {directory} {fault}")


def _default_bytes(device: str) -> int:
    share, limit_bytes = DEFAULTS[device]
    return min(limit_bytes, usable_memory_bytes() // share)
