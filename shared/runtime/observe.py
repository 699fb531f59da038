"""Serves /live, /health, /metrics and /sd of one process.

/live      200 while the event loop runs, under any load
/health    200 when the service is ready, else 503; {"ready": …, "reasons": […]}
/metrics   Prometheus text; OpenMetrics, which has exemplars, for a scraper that asks for it
/sd        where Prometheus finds the metrics of all processes; 503 until this process knows

A page of another site gets 403 from all of them at a port of the process's own (origin.py).
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from shared.config import ObserveConfig
from shared.errors import ConfigError
from shared.messages.cards import Instance
from shared.runtime.origin import OriginRule, rule_of

IDLE_S = 75.0
"""The time in seconds after which a connection without requests is closed."""
_OPENMETRICS = "application/openmetrics-text"
_NEVER = ("0", "0.0", "0.00", "0.000")
_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - only compared, not bound


class ProcessHealth:
    """The state that a process shows at /health and in Pong. The service sets it."""

    def __init__(self) -> None:
        self._reasons: list[str] = ["starting"]
        self._judge: Callable[[], Sequence[str]] | None = None
        self.also: Callable[[], dict[str, list[str]]] = dict
        """Returns further fields of /health."""
        self.targets: Callable[[], bytes | None] | None = lambda: None
        """Returns the content of /sd; None while the process has not read the address book. None if it does not follow
        all of it."""
        self._draining: Callable[[], str] | None = None
        self.progress = 0
        """The number of steps of the engine, if there is one, for Pong."""

    @property
    def reasons(self) -> Sequence[str]:
        """The reasons why the process is not ready. Empty if it is ready."""
        if self._draining is not None:
            return [self._draining()]
        return self._reasons if self._judge is None else self._judge()

    def drain(self, waits_for: Callable[[], str] = lambda: "draining") -> None:
        """Show that the process drains, and what it waits for. It is never ready again."""
        self._draining = waits_for

    def delegate(self, reasons: Callable[[], Sequence[str]], also: Callable[[], dict[str, list[str]]]) -> None:
        """Call these for each /health from now on, in place of `ready` and `unready`."""
        self._judge, self.also = reasons, also

    def ready(self) -> None:
        """Show that the service is ready."""
        self._reasons = []

    def unready(self, *reasons: str) -> None:
        """Show that the service is not ready, and why."""
        assert reasons
        self._reasons = list(reasons)


def add_routes(app: web.Application, health: ProcessHealth, registry: CollectorRegistry | None) -> None:
    """Add the paths to a service's own application.

    Without a registry, show only what any client may know: whether the process lives and is ready.
    """

    async def answer_live(_request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def answer_health(_request: web.Request) -> web.Response:
        reasons = list(health.reasons)
        details = {} if registry is None else {"reasons": reasons, **health.also()}
        body = {"ready": not reasons, **details}
        return web.json_response(body, status=503 if reasons else 200)

    app.router.add_get("/live", answer_live)
    app.router.add_get("/health", answer_health)
    if registry is not None:
        app.router.add_get("/metrics", partial(_metrics, registry))
        app.router.add_get("/sd", partial(_targets, health))


async def _metrics(registry: CollectorRegistry, request: web.Request) -> web.Response:
    form = openmetrics if takes_openmetrics(request.headers.getall("Accept", ())) else exposition
    body, kind = form.generate_latest(registry), form.CONTENT_TYPE_LATEST
    return web.Response(body=body, headers={"Content-Type": kind, "Vary": "Accept"})


def takes_openmetrics(accept: Sequence[str]) -> bool:
    """Return whether a scraper's headers `Accept` name OpenMetrics 1.0. Prometheus does so if it takes exemplars; a
    browser, curl and older scrapers get the classic format."""
    for kind in ",".join(accept).lower().split(","):
        name, *parameters = (part.strip() for part in kind.split(";"))
        given = {key: value for key, _, value in (part.partition("=") for part in parameters)}
        if name == _OPENMETRICS and given.get("version", "1.0.0") == "1.0.0" and given.get("q") not in _NEVER:
            return True
    return False


async def _targets(health: ProcessHealth, _request: web.Request) -> web.Response:
    if health.targets is None:
        raise web.HTTPNotFound(text="this process does not know all others; ask a frontend, a router or a kvbm\n")
    targets = health.targets()
    if targets is None:  # Prometheus then keeps the targets that it has
        raise web.HTTPServiceUnavailable(text="the address book is not read yet\n")
    return web.Response(body=targets, content_type="application/json")


def advertised(host: str) -> str:
    """Return the host at which others reach a socket bound to `host`: this machine's name if that is any address."""
    return socket.gethostname() if host in _EVERYWHERE else host


def check_host(setting: str, host: str) -> None:
    """Check that this machine can listen at `host`. Raise ConfigError, which names the setting."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, UnicodeError) as wrong:
        why = (getattr(wrong, "strerror", None) or "no name of a host").partition(" (")[
            0
        ]  # Python names the address again
        raise ConfigError(f"{setting}: {host} is no address of this machine: {why}") from None


@asynccontextmanager
async def serving(config: ObserveConfig, health: ProcessHealth, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve these paths at `config`'s host and port, and yield the base URL. Raise ConfigError if that fails."""
    app = web.Application(middlewares=[_refuse_pages(rule_of("observe", config.host, config.hosts))])
    add_routes(app, health, registry)
    # No path reads a body, but aiohttp would decompress one in the event loop.
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


def _refuse_pages(rule: OriginRule) -> Middleware:
    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := rule.refusal(request.headers, linkable=True):
            return web.Response(status=403, text=f"{why}\n")
        return await handler(request)

    return refuse


def _write(file: Path, url: str) -> None:
    try:
        file.write_text(url + "\n", encoding="utf-8")
    except OSError as wrong:
        raise ConfigError(f"observe.url_file: {file}: {wrong.strerror}") from None


def scrape_targets(instances: Iterable[Instance]) -> bytes:
    """Return the targets as JSON: one for each instance that has a /metrics, in the order of services and instances.

    Format: https://prometheus.io/docs/prometheus/latest/http_sd/

    Every process serves them from the address book that it follows anyway, so there is no writer of files. One that has
    not read it yet answers 503: for an empty list, Prometheus would drop all targets.
    """
    groups: list[dict[str, object]] = []
    for one in sorted(instances, key=lambda one: (one.service, one.instance)):
        url = urlsplit(one.http)
        if not url.netloc:
            continue
        labels = {
            "namespace": one.namespace,
            "service": one.service,
            "instance": one.instance,
            "__scheme__": url.scheme,
            "__metrics_path__": f"{url.path.rstrip('/')}/metrics",
        }
        groups.append({"targets": [url.netloc], "labels": labels})
    return msgspec.json.encode(groups)
