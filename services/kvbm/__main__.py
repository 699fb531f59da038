"""The kvbm process: `python -m services.kvbm --config kvbm.toml`."""

from __future__ import annotations

from services.kvbm.config import KvbmConfig
from services.kvbm.service import serve
from services.kvbm.tiers import policies
from shared.runtime.lifecycle import ProcessSettings, run

DRAIN_LIMIT_S = 25.0
"""Seconds that stopping may take. A disk that does not answer, a frozen NATS and a frozen etcd cost some each."""


def main() -> None:
    """Run until a signal, then end the process with a status."""
    run("kvbm", KvbmConfig, _process, serve, check=_check)


def _check(config: KvbmConfig) -> None:
    for name in (config.tiers.host_policy, config.tiers.disk_policy):
        policies.named(name, 1)


def _process(config: KvbmConfig) -> ProcessSettings:
    return ProcessSettings.of(config, DRAIN_LIMIT_S)


if __name__ == "__main__":
    main()
