"""The block store of one `up`: how large its flags want it, and its place in memory for as long as `up` runs."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from deploy.local.stack.private_pool import MEMORY, private_pool
from deploy.local.stack.stack import BlockStoreOptions
from shared.errors import ConfigError

DEFAULTS = {"cpu": (16, 1 << 30), "cuda": (8, 32 << 30)}
"""By default it takes one part in so many of the machine's memory, and so much at most: modest, so that a laptop does
not notice; beside GPUs, whose blocks are larger and soon many, enough to be of use."""
DISK_BYTES = 10 << 30
"""Of `--kvbm-disk`, where nothing else is said."""
ENGINES_WITH_STORE = ("native",)
"""Engines that have one unasked. A simulated fleet is what its settings say."""
ENGINES_WITHOUT_BLOCKS = ("echo",)
"""Engines that compute no blocks."""
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class StoreRequest(Struct, frozen=True):
    """What the flags ask for."""

    pool_bytes: int
    """0: no block store."""
    disk: str
    disk_bytes: int
    explicit: bool
    """Whether somebody named it, and wants to hear where it cannot be; else the others go on without."""


def store_request(size: str, disk: Path | None, disk_size: str, *, engine: str, device: str = "cpu") -> StoreRequest:
    """Of `--kvbm-bytes` (empty: not given), `--kvbm-disk` and `--kvbm-disk-bytes`. Raises ConfigError."""
    if disk_size and disk is None:
        raise ConfigError("--kvbm-disk-bytes needs a --kvbm-disk")
    disk_bytes = parse_size(disk_size, "--kvbm-disk-bytes") if disk_size else DISK_BYTES
    if not size and disk is None:
        return StoreRequest(_default_bytes(device) if engine in ENGINES_WITH_STORE else 0, "", 0, explicit=False)
    pool_bytes = parse_size(size, "--kvbm-bytes") if size else _default_bytes(device)
    if pool_bytes == 0 and disk is not None:
        raise ConfigError("--kvbm-disk needs some --kvbm-bytes: blocks get there through memory")
    if pool_bytes and engine in ENGINES_WITHOUT_BLOCKS:
        raise ConfigError(f"--kvbm-bytes: engine {engine} has no blocks to store")
    return StoreRequest(pool_bytes, "" if disk is None else str(disk.absolute()), disk_bytes, explicit=True)


def parse_size(size: str, flag: str) -> int:
    """Bytes of `512M`: K, M, G and T are powers of 1024. Raises ConfigError, naming the flag."""
    match = _SIZE.fullmatch(size.strip().upper())
    if match is None:
        raise ConfigError(f"{flag} {size}: not a size, such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2]]


@contextmanager
def block_store(
    wish: StoreRequest, notice: Callable[[str], None], memory: Path = MEMORY
) -> Iterator[BlockStoreOptions | None]:
    """Its settings; None where it is not wanted, or, with a notice, where nobody asked for it and it cannot be. Raises
    ConfigError where somebody did, and where the disk's directory is none of this user's alone."""
    if wish.disk:
        _check_disk(Path(wish.disk))
    store = None
    with ExitStack() as held:
        try:
            if wish.pool_bytes:
                pool = held.enter_context(private_pool(memory))
                store = BlockStoreOptions(str(pool), wish.pool_bytes, wish.disk, wish.disk_bytes, wish.explicit)
        except ConfigError as wrong:
            if wish.explicit:
                raise
            notice(f"without kvbm: {wrong}")
        yield store


def _check_disk(directory: Path) -> None:
    """Tells at the start, and to who typed it, what would else be a tier that is off. Like kvbm, makes it where it is
    missing, and none above it."""
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as wrong:
        raise ConfigError(f"--kvbm-disk {directory}: {wrong.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"--kvbm-disk {directory} is no directory")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"--kvbm-disk {directory} must be this user's alone (mode 0700), or not be there yet")


def _default_bytes(device: str) -> int:
    share, limit_bytes = DEFAULTS[device]
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(limit_bytes, memory_bytes // share)
