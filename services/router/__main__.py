"""The router's process: `python -m services.router --config router.toml`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.router.config import RouterConfig
from shared.runtime.lifecycle import Service, run
from shared.runtime.runtime import Runtime

DRAIN_LIMIT_S = 15.0
"""Seconds until a stopping router gives up. It only has to answer the requests it has received, but a frozen NATS and a
frozen etcd cost seconds each."""


def _check(config: RouterConfig) -> None:
    from services.router.selection.policy import load_policy

    load_policy(config.policy)


def _load() -> Callable[[Runtime, RouterConfig], Awaitable[None]]:
    """Load the router's modules, and return what serves."""
    from services.router.service import serve

    return serve


async def _serve_loaded(runtime: Runtime, config: RouterConfig) -> None:
    """Serve. The modules are loaded in a thread, so that other services of this process start meanwhile."""
    serve = await asyncio.to_thread(_load)
    await serve(runtime, config)


SERVICE = Service("router", RouterConfig, _serve_loaded, lambda _: DRAIN_LIMIT_S, check=_check)


def main() -> None:
    """Run until a signal, and end the process with a status."""
    _load()  # alone in its process, it has nothing else to do
    run(SERVICE)


if __name__ == "__main__":
    main()
