"""The process that decides whose turn it is: `python -m services.worker.turns --config turns.toml`."""

from __future__ import annotations

from services.worker.turns.config import TurnsConfig
from services.worker.turns.service import serve
from shared.runtime.lifecycle import Service, run

DRAIN_LIMIT_S = 10.0
"""Seconds that stopping may take: a frozen NATS and a frozen etcd cost some each."""

SERVICE = Service("turns", TurnsConfig, serve, lambda _: DRAIN_LIMIT_S)


def main() -> None:
    """Run until a signal, then end the process with a status."""
    run(SERVICE)


if __name__ == "__main__":
    main()
