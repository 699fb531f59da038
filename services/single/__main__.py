"""Runs a frontend, a worker and a router as one process, which needs neither NATS nor etcd.

    python -m services.single frontend --config F … worker --config W … router --config R …

They drain in this order, as `up` drains processes: accepted requests are answered. The engine has its own process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from services.frontend.__main__ import SERVICE as FRONTEND
from services.frontend.__main__ import quieten_panics
from services.router.__main__ import SERVICE as ROUTER
from services.worker.__main__ import SERVICE as WORKER
from shared.runtime.lifecycle import Service, run_together
from shared.runtime.memory import MemoryNetwork

SERVICES: tuple[Service[Any], ...] = (FRONTEND, WORKER, ROUTER)


def main() -> None:
    """Run until a signal, then end the process with an exit status."""
    quieten_panics()
    flags = flags_by_service(sys.argv[1:])
    services = [(service, flags[service.name]) for service in SERVICES]
    run_together("single", services, MemoryNetwork().connect)


def flags_by_service(words: Sequence[str]) -> dict[str, list[str]]:
    """Return each service's flags, which follow its name."""
    flags: dict[str, list[str]] = {service.name: [] for service in SERVICES}
    of_service = flags[FRONTEND.name]
    for word in words:
        if word in flags:
            of_service = flags[word]
        else:
            of_service.append(word)
    return flags


if __name__ == "__main__":
    main()
