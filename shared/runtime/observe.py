"""/live, /health and /metrics of one process.

/live      200 while the event loop turns; never a question of load
/health    200 when the service is ready, else 503; {"ready": …, "reasons": […]}
/metrics   Prometheus text
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shared.config import ObserveConfig
from shared.errors import ConfigError

IDLE_S = 75.0
"""How long a connection may be without a request."""
_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not bound


class Health:
    """What a process says of itself at /health and to Ping. The service sets it."""

    def __init__(self) -> None:
        self._reasons: list[str] = ["starting"]
        self._judge: Callable[[], Sequence[str]] | None = None
        self.also: Callable[[], dict[str, list[str]]] = dict
        """What /health says beside."""
        self._draining: Callable[[], str] | None = None
        self.progress = 0
        """The engine's step count, where there is an engine; goes into Pong."""

    @property
    def reasons(self) -> Sequence[str]:
        """Why it is not ready; empty: it is."""
        if self._draining is not None:
            return [self._draining()]
        return self._reasons if self._judge is None else self._judge()

    def drain(self, waits_for: Callable[[], str] = lambda: "draining") -> None:
        """The process was asked to end: it is never ready again, and says what it waits for."""
        self._draining = waits_for

    def ask(self, reasons: Callable[[], Sequence[str]], also: Callable[[], dict[str, list[str]]]) -> None:
        """From now on these tell, at each look, instead of `ready` and `unready`."""
        self._judge, self.also = reasons, also

    def ready(self) -> None:
        """What the service is there for would be done now."""
        self._reasons = []

    def unready(self, *reasons: str) -> None:
        """It would not, because …"""
        assert reasons
        self._reasons = list(reasons)


def add_routes(app: web.Application, vitals: Health, registry: CollectorRegistry | None) -> None:
    """The three paths on an application of the service's own; without a registry only what strangers may know: whether
    it lives and is ready."""

    async def live(_request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def health(_request: web.Request) -> web.Response:
        reasons = list(vitals.reasons)
        told = {} if registry is None else {"reasons": reasons, **vitals.also()}
        body = {"ready": not reasons, **told}
        return web.json_response(body, status=503 if reasons else 200)

    app.router.add_get("/live", live)
    app.router.add_get("/health", health)
    if registry is not None:
        app.router.add_get("/metrics", partial(_metrics, registry))


async def _metrics(registry: CollectorRegistry, _request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def advertised(host: str) -> str:
    """Where others reach a socket that is bound to `host`: this machine's name where that is any address."""
    return socket.gethostname() if host in _EVERYWHERE else host


@asynccontextmanager
async def serving(config: ObserveConfig, vitals: Health, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serves the three paths at `config`'s host and port; gives the base URL. Raises ConfigError if it cannot."""
    app = web.Application()
    add_routes(app, vitals, registry)
    # No path reads a body; aiohttp would decompress one in the loop all the same.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=IDLE_S, auto_decompress=False)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as wrong:
            raise ConfigError(f"observe: cannot listen on {config.host}:{config.port}: {wrong.strerror}") from None
        host, port = advertised(config.host), runner.addresses[0][1]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if config.url_file:
            _write(Path(config.url_file), url)
        yield url
    finally:
        await runner.cleanup()


def _write(file: Path, url: str) -> None:
    try:
        file.write_text(url + "\n", encoding="utf-8")
    except OSError as wrong:
        raise ConfigError(f"observe.url_file: {file}: {wrong.strerror}") from None
