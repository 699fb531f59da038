"""The router's process: `python -m services.router --config router.toml`."""

from __future__ import annotations

from services.router.config import RouterConfig
from services.router.selection.policy import load_policy
from services.router.service import serve
from shared.runtime.lifecycle import Service, run

DRAIN_LIMIT_S = 15.0
"""Seconds until a stopping router gives up. It only has to answer the requests it has received, but a frozen NATS and a
frozen etcd cost seconds each."""


def _check(config: RouterConfig) -> None:
    load_policy(config.policy)


SERVICE = Service("router", RouterConfig, serve, lambda _: DRAIN_LIMIT_S, check=_check)


def main() -> None:
    """Run until a signal, and end the process with a status."""
    run(SERVICE)


if __name__ == "__main__":
    main()
