"""The memory service's process: `python -m services.worker.memory --directory DIR`. It needs neither NATS nor etcd, and
ends at SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from services.worker.memory.config import MemoryConfig
from services.worker.memory.ledger import LedgerLimits
from services.worker.memory.service import MemoryService
from shared.config import load
from shared.errors import ConfigError
from shared.machine_memory import usable_memory_bytes
from shared.runtime import logs
from shared.runtime.usage import usage

PROGRAM = "headrace-memory"
CHECKS = frozenset(("--check", "--check-settings"))
"""Flags with which nothing is started; it has no files to check."""
EXIT_SETTINGS = 2
"""The exit status for settings that cannot work."""

_log = logging.getLogger(__name__)


def main(flags: Sequence[str]) -> int:
    """Serve until a signal. Return the exit status."""
    if "--help" in flags:
        print(usage(PROGRAM, MemoryConfig), end="")
        return 0
    try:
        config = load(MemoryConfig, flags=[flag for flag in flags if flag not in CHECKS])
        if CHECKS.intersection(flags):
            return 0
        logs.start("memory", "", config.log_level, config.log_format)
        size_bytes = config.size_bytes or usable_memory_bytes() // 2
        limits = LedgerLimits(size_bytes, config.keep_s, config.write_s)
        service = MemoryService(Path(config.directory), limits)
    except ConfigError as wrong:
        print("\n".join(f"{PROGRAM}: {line}" for line in str(wrong).splitlines()), file=sys.stderr)
        return EXIT_SETTINGS
    with closing(service):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())
        _log.info("weights of at most %d bytes are kept for engines that ask in %s", size_bytes, config.directory)
        service.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
