"""The frontend put together: what a process runs, and what tests run on the in-process twins.

start    frames and lost instances, who is there and their models, both doors, the address book
drain    no more of the NATS queue group's requests; /health says 503, and a balancer has `http.drain_delay_s` for it;
         then no new connections; a client that keeps one may ask once more (server/port.py),
         then new requests are refused and running ones end (or drain_s passes: then they end with an error);
         then the address book goes: workers cancel what a frontend that is gone had asked for
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial

import msgspec

from services.frontend.auth.access import Authenticator
from services.frontend.config import FrontendConfig, HttpConfig
from services.frontend.metrics import Metrics
from services.frontend.models.model import ParserNames
from services.frontend.models.registry import ModelRegistry
from services.frontend.openapi.document import document
from services.frontend.readiness import Readiness
from services.frontend.requests.service import RequestService
from services.frontend.server.middleware import Middleware
from services.frontend.server.nats_api import NatsApi
from services.frontend.server.port import Port
from services.frontend.server.routes import HttpApi
from services.frontend.serving.dispatch import Dispatcher
from services.frontend.serving.response_directory import ResponseDirectory
from services.frontend.structured.compiler import GrammarCompiler
from shared import subjects
from shared.discovery.contract import Registration
from shared.runtime.lifecycle import Runtime, settle_memory
from shared.runtime.observe import add_routes

_THREADS = 2
"""For loading and for long prompts; the tokenizer has threads of its own beside them."""

INFORMED_LIMIT_S = 5.0
"""How long a frontend that starts waits for etcd, and for the tokenizers of the models that are served."""
OWN_FILES = 256
"""What a frontend opens beside its clients' connections, and some to spare."""

ABANDONED_S = 1.0
"""How long clients may take to read that their request was given up."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def frontend(runtime: Runtime, config: FrontendConfig) -> AsyncIterator[HttpApi]:
    """A frontend that serves while the context is open, and drains when it is left."""
    metrics = Metrics(runtime.registry)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize") as pool:
        models = ModelRegistry(runtime.directory, config.models, runtime.tasks, pool, partial(_parsers, config))
        requests = RequestService(runtime, config.limits, metrics)
        access = Authenticator(config.access, metrics)
        grammars = GrammarCompiler()
        desk = ResponseDirectory(runtime, config.responses, metrics)
        exchange = Dispatcher(requests, models, pool, metrics, grammars, desk)
        port = Port(with_files(config.http), metrics)
        http = HttpApi(exchange, requests, metrics, config.http, port, Middleware(access, config.http))
        nats = NatsApi(runtime, exchange, requests, metrics, access, config.nats.inbox)
        app = http.app(document(keys=access.requires_key))
        # Who has no key is told whether all is well; metrics, and why it is not, are [observe]'s.
        add_routes(app, runtime.vitals, None if access.requires_key else runtime.registry)
        await access.start(runtime.tasks)
        await port.start(runtime.tasks)
        await requests.start()
        await desk.start()
        Readiness(runtime, models).start()
        await _informed(runtime, models)
        async with aclosing(grammars), port.open(app) as url:
            http.url = url
            await nats.start()
            # Not waited for: a frontend serves also while etcd is away.
            registering = runtime.tasks.create_task(_register(runtime, url), name="register")
            try:
                yield http
            finally:
                await nats.stop()  # before it refuses: what it is asked until then could have gone to another one
                runtime.vitals.drain(partial(_left, requests, config.limits.drain_s))
                await port.announce_closing()
                try:
                    async with asyncio.timeout(config.limits.drain_s):
                        await port.drain()
                        requests.admission.closed = True
                        await requests.wait_idle()
                except TimeoutError:
                    _log.warning("requests are still running after %s s", config.limits.drain_s)
                    requests.admission.closed = True
                    requests.fail_all()
                    with suppress(TimeoutError):  # clients that do not read, or do not send
                        async with asyncio.timeout(ABANDONED_S):
                            await requests.wait_idle()
                if registering.done():
                    await registering.result().close()
                else:
                    registering.cancel()


def _left(requests: RequestService, limit_s: float) -> str:
    """What a frontend that drains waits for."""
    count = len(requests.admission.permits)
    return f"{count} {'request runs' if count == 1 else 'requests run'}, up to {limit_s:g} s" if count else "draining"


def _parsers(config: FrontendConfig, model: str) -> ParserNames:
    return ParserNames(config.tool_parser.get(model, "auto"), config.reasoning_parser.get(model, "auto"))


async def _informed(runtime: Runtime, models: ModelRegistry) -> None:
    """Who is there already is known, and can be asked: a door that opens before would refuse what other frontends, on
    the same port or in the same queue group, can serve. Without etcd it opens all the same, after a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(INFORMED_LIMIT_S):
            await runtime.directory.synced()
            await models.wait_loaded()


async def serve(runtime: Runtime, config: FrontendConfig) -> None:
    """Until `runtime.stopping`."""
    async with frontend(runtime, config):
        settle_memory()
        await runtime.stopping.wait()


async def _register(runtime: Runtime, url: str) -> Registration:
    namespace, instance = runtime.namespace, runtime.instance
    operations = {
        "control": subjects.control(namespace, "frontend", instance),
        "stream": subjects.stream(namespace, instance),
    }
    return await runtime.discovery.register(lambda epoch: runtime.address(epoch, operations, api=url))


def with_files(config: HttpConfig) -> HttpConfig:
    """As many files as this process may open, and no more connections than that leaves room for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = most - OWN_FILES
    if most == resource.RLIM_INFINITY or config.connections <= room:
        return config
    _log.warning("http.connections is %d, but this process may open %d files only", config.connections, most)
    return msgspec.structs.replace(config, connections=max(1, room))
