"""Assembles the frontend, for a process of its own and for tests on in-memory fakes.

start    step frames and lost instances, the directory and the models, the APIs for HTTP and NATS, the entry in etcd
drain    leave the NATS queue group; /health says 503, and a load balancer has `http.drain_delay_s` to notice it;
         then accept no new connections; a client on an open one may send one more request (server/port.py);
         meanwhile the endpoint picker ends the streams that need it no more, and only then refuses new ones;
         then refuse new requests and let running ones end; after `drain_s` they fail;
         then the entry in etcd goes: workers cancel what a frontend that is gone had sent
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from services.frontend.auth.access import Authenticator
from services.frontend.config import FrontendConfig, HttpConfig
from services.frontend.images.reader import ImageReader
from services.frontend.media.store import MediaStore
from services.frontend.metrics import Metrics
from services.frontend.models.encode_pool import EncodePool
from services.frontend.models.fetched_files import ModelFiles
from services.frontend.models.model import ParserNames
from services.frontend.models.registry import ModelRegistry
from services.frontend.openapi.document import document
from services.frontend.readiness import Readiness
from services.frontend.requests.service import RequestService
from services.frontend.server.middleware import Middleware
from services.frontend.server.nats_api import NatsApi
from services.frontend.server.port import Port
from services.frontend.server.routes import HttpApi
from services.frontend.serving.chat import ServingChat
from services.frontend.serving.dispatch import Dispatcher
from services.frontend.serving.picture_edits import EditImages
from services.frontend.serving.pictures import ServingPictures
from services.frontend.serving.response_directory import ResponseDirectory
from services.frontend.serving.text_proxy import TextProxy
from services.frontend.serving.videos import ServingVideos
from services.frontend.structured.compiler import GrammarCompiler
from services.frontend.ui.routes import PageApi
from shared import subjects
from shared.discovery.contract import Registration
from shared.runtime.lifecycle import settle_memory
from shared.runtime.observe import add_routes
from shared.runtime.runtime import Runtime

if TYPE_CHECKING:
    from services.frontend.picker.server import PickerPort

_THREADS = 2
"""The number of threads for loading models and for long prompts; the tokenizer has threads of its own."""

INFORMED_LIMIT_S = 5.0
"""Seconds that a starting frontend waits for etcd, and for the tokenizers of the models that are served."""
REGISTERED_LIMIT_S = 2.0
"""Seconds after which a frontend that listens is ready without being registered."""
OWN_FILES = 256
"""The number of files that a frontend opens in addition to its clients' connections, with some to spare."""
PAGE_CONNECTIONS = 128
"""The largest number of connections at the page's own port: open pages, and what they ask."""

ABANDONED_S = 1.0
"""Seconds that clients may take to read that their request has failed."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def frontend(runtime: Runtime, config: FrontendConfig) -> AsyncIterator[HttpApi]:
    """Serve while the context is open, and drain when it is left."""
    metrics = Metrics(runtime.registry)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize") as threads:
        models = _registry(runtime, config, threads)
        service = RequestService(runtime, config.limits, metrics)
        access = Authenticator(config.access, metrics)
        grammars, images = GrammarCompiler(), ImageReader(config.images, config.nats.payload_limit_bytes)
        chat = ServingChat(service, models, EncodePool(threads, _THREADS), metrics, grammars, images, config)
        media, edits = MediaStore(config.media, lambda: http.url), EditImages(images)
        videos = ServingVideos(ServingPictures(service, models, media, edits, runtime.draw))
        dispatcher = Dispatcher(chat, directory := ResponseDirectory(runtime, config.responses, metrics), videos)
        texts = TextProxy(runtime, service, models, metrics, config)
        port = Port(with_files(config.http), metrics)
        place = config.ui.place(keys=(keys := access.requires_key))
        page = None if place == "off" else PageApi(runtime, service, config.ui, config.http.hosts, keys=keys)
        keyless = () if page is None else page.keyless_paths
        middleware = Middleware(access, config.http, keyless, config.ui.hosts)
        http = HttpApi(dispatcher, service, metrics, config.http, port, middleware, texts, runtime.tracer)
        nats = NatsApi(runtime, dispatcher, service, metrics, access, config.nats.inbox)
        app = http.app(document(keys=keys, closed=config.unknown_fields == "refuse"))
        # Without a key, clients learn only whether all is well; reasons and metrics are on the port of [observe].
        add_routes(app, runtime.health, None if keys else runtime.registry)
        apps = {port: app}
        if page is not None:
            page_app = app
            if place == "port":
                own = Port(settings := page_port(config), metrics, "ui")
                apps[own] = page_app = http.chat_app(own, Middleware(access, settings, keyless, config.ui.hosts))
            page.add_routes(page_app)
            await page.start()
        await asyncio.gather(access.start(runtime.tasks), *(each.start(runtime.tasks) for each in apps))
        await dispatcher.start(runtime.tasks)
        await directory.start()
        readiness = await _informed(runtime, models)
        async with aclosing(grammars), aclosing(images), aclosing(texts), AsyncExitStack() as opened:
            urls = [await opened.enter_async_context(each.open(served)) for each, served in apps.items()]
            http.url, http.page_url = urls[0], urls[-1] if page is not None else ""
            await nats.start()
            pickers = await _pickers(runtime, config, chat, dispatcher)
            registering = await _begin_registration(runtime, http.url, readiness)
            try:
                yield http
            finally:
                dispatcher.stop()
                await nats.stop()  # before requests are refused, so that they go to another frontend
                runtime.health.drain(partial(_left, service, config.limits.drain_s))
                if page is not None:
                    page.close()
                await _drain(service, apps, pickers, texts, config.limits.drain_s)
                await _end_registration(registering)


def _registry(runtime: Runtime, config: FrontendConfig, threads: Executor) -> ModelRegistry:
    files = ModelFiles(runtime.bus, runtime.namespace)
    parsers, expected = partial(_parsers, config), config.expected_models
    return ModelRegistry(runtime.directory, files, config.models, runtime.tasks, threads, parsers, expected)


async def _pickers(
    runtime: Runtime, config: FrontendConfig, chat: ServingChat, dispatcher: Dispatcher
) -> list[PickerPort]:
    """Start the endpoint picker, if there is to be one. Raise ConfigError if its port cannot be had."""
    if not config.picker.port:
        return []
    from services.frontend.picker.server import PickerPort  # loads gRPC, which nothing else may need

    picker = PickerPort(runtime, config, chat, dispatcher.foreign)
    await picker.start()
    return [picker]


async def _drain(
    service: RequestService,
    ports: Collection[Port],
    pickers: Collection[PickerPort],
    texts: TextProxy,
    drain_s: float,
) -> None:
    """Let the requests that run end, and refuse new ones. After `drain_s` seconds fail those that are left."""
    await asyncio.gather(*(port.announce_closing() for port in ports))
    stops = asyncio.gather(*(picker.stop(drain_s) for picker in pickers))
    try:
        async with asyncio.timeout(drain_s):
            await asyncio.gather(*(port.drain() for port in ports))
            await asyncio.shield(stops)  # streams that a picker still takes are let in
            service.admission.closed = True
            await service.wait_idle()
    except TimeoutError:
        _log.warning("requests are still running after %s s", drain_s)
        service.admission.closed = True
        service.fail_all()
        await texts.aclose()
        with suppress(TimeoutError):  # for clients that do not read, or do not send
            async with asyncio.timeout(ABANDONED_S):
                await service.wait_idle()
    await stops


def page_port(config: FrontendConfig) -> HttpConfig:
    """Return the settings of the page's own port: those of the API's, but for address and number of connections."""
    own = {"host": config.ui.host, "port": config.ui.port, "reuse_port": False}
    return msgspec.structs.replace(config.http, **own, connections=PAGE_CONNECTIONS)


def _left(service: RequestService, limit_s: float) -> str:
    """Return what a frontend that drains waits for."""
    count = len(service.admission.permits)
    return f"{count} {'request runs' if count == 1 else 'requests run'}, up to {limit_s:g} s" if count else "draining"


def _parsers(config: FrontendConfig, model: str) -> ParserNames:
    return ParserNames(config.tool_parser.get(model, "auto"), config.reasoning_parser.get(model, "auto"))


async def _informed(runtime: Runtime, models: ModelRegistry) -> Readiness:
    """Wait until registered workers are known and their models loaded. A frontend that listens earlier would refuse
    requests that others, on the same port or in the same queue group, can serve. Without etcd it listens later."""
    readiness = Readiness(runtime, models)
    readiness.start()
    with suppress(TimeoutError):
        async with asyncio.timeout(INFORMED_LIMIT_S):
            await runtime.directory.synced()
            await models.wait_loaded()
    return readiness


async def serve(runtime: Runtime, config: FrontendConfig) -> None:
    """Serve until `runtime.stopping` is set."""
    async with frontend(runtime, config):
        settle_memory()
        await runtime.stopping.wait()


async def _begin_registration(runtime: Runtime, url: str, readiness: Readiness) -> asyncio.Task[Registration]:
    """Begin to register. The frontend is ready once it has, or after a while, since it serves without etcd too."""
    registering = runtime.tasks.create_task(_register(runtime, url), name="register")
    await asyncio.wait({registering}, timeout=REGISTERED_LIMIT_S)
    readiness.started = True
    return registering


async def _register(runtime: Runtime, url: str) -> Registration:
    namespace, instance = runtime.namespace, runtime.instance
    operations = {
        "control": subjects.control(namespace, "frontend", instance),
        "stream": subjects.stream(namespace, instance),
    }
    return await runtime.discovery.register(lambda epoch: runtime.address(epoch, operations, api=url))


async def _end_registration(registering: asyncio.Task[Registration]) -> None:
    if registering.done():
        await registering.result().close()
    else:
        registering.cancel()


def with_files(config: HttpConfig) -> HttpConfig:
    """Raise this process's limit of open files, and return the settings with no more connections than it allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = most - OWN_FILES
    if most == resource.RLIM_INFINITY or config.connections <= room:
        return config
    _log.warning("http.connections is %d, but this process may open %d files only", config.connections, most)
    return msgspec.structs.replace(config, connections=max(1, room))
