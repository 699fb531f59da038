"""An API server of Kubernetes on loopback, with lists and watches of objects that a test changes.

It keeps to what https://kubernetes.io/docs/reference/using-api/api-concepts/ says of versions, watches, bookmarks and
selectors. A test gives it the rules of a Role; what they do not allow is 403.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.servers import free_port

NAMESPACES = "/apis/inference.networking.k8s.io/v1/namespaces/", "/api/v1/namespaces/"
POOLS, PODS = f"{NAMESPACES[0]}default/inferencepools", f"{NAMESPACES[1]}default/pods"
TOKEN = "a-token"
RULES = (
    {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
)
Object = dict[str, Any]


def pool(name: str, labels: Mapping[str, str], *ports: int, protocol: str = "http") -> Object:
    spec = {"selector": {"matchLabels": dict(labels)}, "targetPorts": [{"number": port} for port in ports]}
    spec |= {"appProtocol": protocol, "endpointPickerRef": {"name": "picker", "port": {"number": 9002}}}
    return {"kind": "InferencePool", "metadata": {"name": name}, "spec": spec}


def pod(name: str, address: str, labels: Mapping[str, str], *, ready: bool = True, phase: str = "Running") -> Object:
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True" if ready else "False"}]
    status = {"phase": phase, "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels), "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        "status": status,
    }


class KubeServer:
    """The objects of a namespace, and those that watch them."""

    def __init__(self, rules: Sequence[Mapping[str, Sequence[str]]] = RULES, namespace: str = "default") -> None:
        self.rules = rules
        self.url = f"http://127.0.0.1:{free_port()}"
        self.token = ""
        """What clients must show; empty if nothing."""
        self.seen: list[tuple[str, dict[str, str]]] = []
        """Each question's path and query."""
        self.said: dict[str, Callable[[], web.Response]] = {}
        """What a path answers in place of a list."""
        self.pools, self.pods = f"{NAMESPACES[0]}{namespace}/inferencepools", f"{NAMESPACES[1]}{namespace}/pods"
        self.paths = {self.pools, self.pods}
        self._objects: dict[str, dict[str, Object]] = {self.pools: {}, self.pods: {}}
        self._version = 1
        self._oldest = 1
        """The oldest version from which a watch may begin."""
        self._history: list[tuple[int, str, str, Object, Object | None]] = []
        """Each change: its version, path, kind, the object, and what it was before."""
        self._changed = asyncio.Condition()
        self._watching: dict[asyncio.Transport, str] = {}

    @property
    def watched(self) -> list[str]:
        """The paths of all open watches."""
        return sorted(self._watching.values())

    async def put(self, path: str, made: Object) -> None:
        """Create or change an object."""
        name = made["metadata"]["name"]
        before = self._objects[path].get(name)
        await self._note(path, "ADDED" if before is None else "MODIFIED", made, before)
        self._objects[path][name] = made

    async def delete(self, path: str, name: str) -> None:
        await self._note(path, "DELETED", before := self._objects[path].pop(name), before)

    async def bookmark(self, path: str) -> int:
        """Tell watches the version, which other objects have moved on, and return it."""
        await self._note(path, "BOOKMARK", {"kind": "?", "metadata": {}}, None)
        return self._version

    async def line(self, path: str, text: str) -> None:
        """Send a line that is no event to those who watch a path."""
        await self._note(path, text, {"metadata": {}}, None)

    def forget(self) -> None:
        """Forget what happened so far: a watch from an older version is 410."""
        self._oldest = self._version = self._version + 1

    def cut(self) -> None:
        """Cut all watches off."""
        for connection in list(self._watching):
            connection.abort()

    async def _note(self, path: str, kind: str, changed: Object, before: Object | None) -> None:
        async with self._changed:
            self._version += 1
            changed["metadata"]["resourceVersion"] = str(self._version)
            self._history.append((self._version, path, kind, json.loads(json.dumps(changed)), before))
            self._changed.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, query = request.path, dict(request.query)
        self.seen.append((path, query))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if not self._allows(path, query):
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        if path not in self.paths:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        if "watch" in query:
            return await self._watch(request, path, query)
        if path in self.said:
            return self.said[path]()
        items = [each for each in self._objects[path].values() if _selected(each, query)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    def _allows(self, path: str, query: Mapping[str, str]) -> bool:
        """A rule with names allows a list and a watch only of one of them, which the query must name."""
        parts, verb = path.split("/"), "watch" if "watch" in query else "list"
        asked = query.get("fieldSelector", "").removeprefix("metadata.name=")
        group, resource = (parts[2] if parts[1] == "apis" else ""), parts[-1]
        return any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and asked in rule.get("resourceNames", [asked])
            for rule in self.rules
        )

    async def _watch(self, request: web.Request, path: str, query: Mapping[str, str]) -> web.StreamResponse:
        at = int(query["resourceVersion"])
        if at < self._oldest:
            return web.json_response({"kind": "Status", "code": 410, "reason": "Expired"}, status=410)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        connection = request.transport
        assert connection is not None
        self._watching[connection] = path
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while True:
                    for version, place, kind, changed, before in self._history:
                        if version > at and place == path and (event := _event(kind, changed, before, query)):
                            await stream.write(event)
                    at = self._version
                    async with self._changed:
                        await self._changed.wait_for(lambda: self._version > at)  # noqa: B023 - it is awaited here
                    if at < self._oldest:
                        status = {"kind": "Status", "code": 410, "reason": "Expired"}
                        await stream.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                        return stream
        except TimeoutError:
            return stream
        finally:
            del self._watching[connection]


def _selected(each: Object, query: Mapping[str, str]) -> bool:
    """Return whether an object is one that a query selects."""
    fields = {"metadata.name": each["metadata"].get("name"), "status.phase": each.get("status", {}).get("phase")}
    labels = each["metadata"].get("labels", {})
    for text, values in ((query.get("fieldSelector", ""), fields), (query.get("labelSelector", ""), labels)):
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if values.get(name) != value:
                return False
    return True


def _event(kind: str, changed: Object, before: Object | None, query: Mapping[str, str]) -> bytes:
    """Return the event of a change for a query; empty if it is none for it."""
    if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
        return kind.encode() + b"\n"
    if kind != "BOOKMARK":
        was, is_now = before is not None and _selected(before, query), _selected(changed, query)
        if not (was or is_now):
            return b""
        if kind == "MODIFIED":  # it came into what is selected, or left it
            kind = "MODIFIED" if was and is_now else "ADDED" if is_now else "DELETED"
    return json.dumps({"type": kind, "object": changed}).encode() + b"\n"


@asynccontextmanager
async def kube_serving(server: KubeServer, tls: ssl.SSLContext | None = None) -> AsyncIterator[KubeServer]:
    """Let it answer; with `tls` over https."""
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    if tls is not None:
        server.url = server.url.replace("http://127.0.0.1", "https://localhost")
    port = int(server.url.rpartition(":")[2])
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls, reuse_address=True).start()
    try:
        yield server
    finally:
        server.cut()
        await runner.cleanup()


def token_file(directory: Path, token: str = TOKEN) -> Path:
    """Write a file with a token."""
    file = directory / "token"
    file.write_text(token)
    return file
