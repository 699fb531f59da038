"""Follows an InferencePool and its Pods at a Kubernetes API server, over HTTPS. reflector.py and pool.py decide.

InferencePool ──its selector──▶ Pods ──those that are ready──▶ servers
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import SystemRandom
from urllib.parse import urlsplit

import aiohttp
from msgspec import Struct

from deploy.local.route.pool import InferencePool, Pod, parse_pool_name, servers_of
from deploy.local.route.reflector import EXPIRED, MOST_OBJECTS, Reflector, T, delay_s
from deploy.local.route.targets import Target
from deploy.local.usage import RouteFlags
from shared.config import environment
from shared.errors import ConfigError, Unavailable
from shared.outbound import TlsFiles, TlsNames, describe_fault, open_connector, read_key, read_tls

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a Pod has its token, and the authority of the API server."""
LIST_LIMIT_S = 10.0
"""Seconds for a list, and for a watch to begin."""
LIST_LIMIT_BYTES = 64 << 20
"""Most bytes of a list."""
EVENT_LIMIT_BYTES = 4 << 20
"""Most bytes of an event; etcd keeps no object of more than 1.5 MiB."""
WATCH_S = 120
"""Seconds after which the server ends a watch, and the next one begins."""
SILENT_S = 15.0
"""Seconds for which a server that does not end the watch is still waited for."""
STEADY_S = 5.0
"""Seconds after which a watch that ends was no failure."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_NAMES = TlsNames("--kube-ca-file", "", "")


class KubeApi(Struct, frozen=True):
    """An API server, and what it is shown."""

    url: str
    """Without a slash at its end."""
    token_file: Path | None = None
    ca_file: Path | None = None

    def check(self) -> None:
        """Raise ConfigError if the server cannot be asked like this."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"--kube-api {self.url}: not a URL such as https://10.96.0.1:443")
        if parts.scheme == "http" and self.token_file is not None and parts.hostname not in _LOCAL:
            raise ConfigError(f"--kube-api {self.url}: a token is sent over https alone")
        self._headers()
        self._tls()

    def _headers(self) -> dict[str, str]:
        if self.token_file is None:
            return {}
        token = read_key(str(self.token_file), f"--kube-token-file {self.token_file}")
        return {"Authorization": f"Bearer {token}"}

    def _tls(self) -> ssl.SSLContext | None:
        return read_tls(TlsFiles("" if self.ca_file is None else str(self.ca_file)), _NAMES)

    async def follow(
        self, path: str, query: Mapping[str, str], reflector: Reflector[T], changed: Callable[[], None]
    ) -> None:
        """Keep the objects at a path true until cancelled; `changed` is called after each change."""
        loop, draw, failures = asyncio.get_running_loop(), SystemRandom(), 0
        while True:
            began_s = loop.time()
            try:
                if not reflector.version:
                    reflector.listed(await self._list(path, query))
                    changed()
                async with self._watch(path, query, reflector.version) as lines:
                    reflector.watching()
                    async for line in lines:
                        if not reflector.watched(line):
                            break
                        changed()
            except (ConfigError, Unavailable) as why:
                reflector.failed(str(why))
            failures = 0 if loop.time() - began_s >= STEADY_S else failures + 1
            await asyncio.sleep(delay_s(failures, draw.random()))

    async def _list(self, path: str, query: Mapping[str, str]) -> bytes:
        content = bytearray()
        async with self._asked(path, {**query, "limit": str(MOST_OBJECTS)}, LIST_LIMIT_S) as answer:
            async for chunk in answer.content.iter_any():
                content += chunk
                if len(content) > LIST_LIMIT_BYTES:
                    raise Unavailable(f"{path} answers more than {LIST_LIMIT_BYTES} bytes")
        return bytes(content)

    @asynccontextmanager
    async def _watch(self, path: str, query: Mapping[str, str], version: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the events of a watch, once it has begun."""
        more = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        async with self._asked(path, {**query, **more}, WATCH_S + SILENT_S) as answer:
            yield _lines(path, answer)

    @asynccontextmanager
    async def _asked(
        self, path: str, query: Mapping[str, str], limit_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield an answer, which is 200 or 410. Raise Unavailable and ConfigError, also while it is read."""
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=LIST_LIMIT_S)
        headers, connector = self._headers(), open_connector("", self._tls(), most=1)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, connector=connector, timeout=limit) as http,
                http.get(self.url + path, params=query, allow_redirects=False) as answer,
            ):
                if answer.status not in (200, 410):
                    raise Unavailable(_refusal(path, answer.status))
                yield answer
        except TimeoutError:
            raise Unavailable(f"its API server was silent for {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as wrong:
            raise Unavailable(f"its API server: {describe_fault(wrong, _NAMES.ca_file)}") from None


def _refusal(path: str, status: int) -> str:
    """Return what a status says."""
    if status == 401:
        return "its API server refuses the token"
    if status == 403:
        return f"{path} may not be listed and watched; docs/picker.md has the Role"
    if status == 404:
        return f"its API server has no {path}; is the Gateway API Inference Extension installed?"
    return f"{path} answers {status}"


async def _lines(path: str, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a watch until it ends or breaks off. Raise Unavailable for one that is too long."""
    if answer.status == 410:
        yield EXPIRED
        return
    rest = b""
    with suppress(aiohttp.ClientError, OSError):  # the next watch says it, if the server is away
        async for chunk in answer.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n")
            if max(map(len, (*whole, rest))) > EVENT_LIMIT_BYTES:
                raise Unavailable(f"{path} has an event of more than {EVENT_LIMIT_BYTES} bytes")
            for line in filter(None, whole):
                yield line


def pool_of(flags: RouteFlags) -> PoolServers | None:
    """Return the InferencePool of the flags; None if they name none. Raise ConfigError."""
    if flags.inference_pool:
        return PoolServers(flags.inference_pool, api_of(flags))
    if flags.kube_api or flags.kube_token_file or flags.kube_ca_file:
        raise ConfigError("--kube-api, --kube-token-file and --kube-ca-file need --inference-pool")
    return None


def api_of(flags: RouteFlags) -> KubeApi:
    """Return the API server of the flags, or of the cluster that this Pod is in. Raise ConfigError."""
    if flags.kube_api:
        api = KubeApi(flags.kube_api.rstrip("/"), flags.kube_token_file, flags.kube_ca_file)
    else:
        variables = environment()
        host, port = variables.get("KUBERNETES_SERVICE_HOST", ""), variables.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError("--inference-pool: this is no Pod; name the API server with --kube-api")
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        api = KubeApi(url, flags.kube_token_file or ACCOUNT / "token", flags.kube_ca_file or ACCOUNT / "ca.crt")
    api.check()
    return api


class PoolServers:
    """The servers of an InferencePool."""

    def __init__(self, name: str, api: KubeApi) -> None:
        """Raise ConfigError for what is not NAMESPACE/NAME."""
        self._namespace, self._name = parse_pool_name(name)
        self._api = api
        self._pools = Reflector(InferencePool)
        self._pods = Reflector(Pod)
        self._selector = ""
        """The selector of the Pods that are followed. Empty if none are."""
        self._targets: tuple[Target, ...] = ()
        self._said: frozenset[str] = frozenset()
        self.known = False
        """True once it is known which servers there are."""

    @property
    def _wanted_selector(self) -> str:
        pool = self._pools.objects.get(self._name)
        return "" if pool is None else pool.label_selector

    def look(self) -> tuple[tuple[Target, ...], list[str]]:
        """Return the servers, and what is to be said of the pool: each once, while it holds."""
        pool = self._pools.objects.get(self._name)
        faults = [each.fault for each in (self._pools, self._pods) if each.fault]
        stay = f"; its servers ({len(self._targets)}) stay as they are" if self._targets else ""
        faults = [f"{fault}{stay}" for fault in dict.fromkeys(faults)]
        current = self._pods.synced and self._selector == self._wanted_selector
        if self._pools.synced and (pool is None or current):
            self.known = True
            self._targets, why = servers_of(pool, self._pods.objects.values())
            faults += filter(None, [why])
        new = [f"InferencePool {self._namespace}/{self._name}: {fault}" for fault in faults if fault not in self._said]
        self._said = frozenset(faults)
        return self._targets, new

    async def run(self) -> None:
        """Follow the pool, and the Pods that it selects, until cancelled. It can be run again, also on another loop."""
        changed = asyncio.Event()
        path = f"/apis/inference.networking.k8s.io/v1/namespaces/{self._namespace}/inferencepools"
        query = {"fieldSelector": f"metadata.name={self._name}"}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._api.follow(path, query, self._pools, changed.set))
            while True:
                selector = self._wanted_selector
                if selector != self._selector:
                    self._selector, self._pods = selector, Reflector(Pod)
                following = tasks.create_task(self._follow_pods(selector))
                while self._wanted_selector == selector:
                    await changed.wait()
                    changed.clear()
                following.cancel()

    async def _follow_pods(self, selector: str) -> None:
        if selector:
            path, query = f"/api/v1/namespaces/{self._namespace}/pods", {"labelSelector": selector}
            await self._api.follow(path, {**query, "fieldSelector": "status.phase=Running"}, self._pods, lambda: None)
