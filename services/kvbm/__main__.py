"""The kvbm process: `python -m services.kvbm --config kvbm.toml`."""

from __future__ import annotations

from services.kvbm.config import KvbmConfig
from services.kvbm.service import check_settings, serve
from shared.runtime.lifecycle import Service, run

DRAIN_LIMIT_S = 25.0
"""Seconds that stopping may take. A disk that does not answer, a frozen NATS and a frozen etcd cost some each."""


def main() -> None:
    """Run until a signal, then end the process with a status."""
    run(Service("kvbm", KvbmConfig, serve, lambda _: DRAIN_LIMIT_S, publishes=True, check=check_settings))


if __name__ == "__main__":
    main()
