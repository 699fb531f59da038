"""A hub on loopback that speaks the protocol of huggingface.co, with faults on demand.

GET /api/models/ORG/NAME/revision/REV       commit, and the files with sizes and digests
GET /api/models/ORG/NAME/tree/REV           the files alone, as huggingface_hub's snapshot_download asks for them
HEAD, GET /ORG/NAME/resolve/REV/FILE        a small file, or a redirect to the other host for a large one
GET /large/DIGEST/FILE                      a large file, at another origin (localhost in place of 127.0.0.1)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

NO_PROXY = "127.0.0.1,localhost"
LARGE = (".safetensors", ".gguf", ".bin")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_LISTING = re.compile(r"/api/models/([^/]+/[^/]+)/revision/(.+)")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/(.+)")


class HubRequest(NamedTuple):
    """One request that came."""

    method: str
    path: str
    range: str
    authorization: str


class Repository:
    """One repository with one branch, `main`, whose commit follows from its files."""

    def __init__(self, files: Mapping[str, bytes], *, gated: bool = False, private: bool = False) -> None:
        self.files = dict(files)
        self.gated = gated
        self.private = private

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def digest(self, name: str) -> str:
        content = self.files[name]
        if name.endswith(LARGE):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a directory, as a repository has them."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


WITHOUT_END = {
    "slow headers": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
    "slow chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a"),
}
"""How an answer begins, and what follows again and again."""


class HubServer:
    """The hub. `token` is the one that may read gated and private repositories."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = "hf_right"
        self.asked: list[HubRequest] = []
        self.faults: dict[str, list[str]] = defaultdict(list)
        """Name of a file, or `listing` → what happens to its next requests, one each: an HTTP status, `to ADDRESS`,
        `cut` and `stall` (in the middle), `drip` (ends after 4 KiB), `changed`, `larger` and `endless` (other content),
        `whole` (no ranges), a key of `WITHOUT_END`. For a listing only statuses, `cut` and these keys."""
        self.without_digest = set[str]()
        """Names of files that the listing has without a digest."""
        self.over = Event()
        """Set at the end, for requests that are held."""
        self.holding = Event()
        """Set when a request is held."""
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.elsewhere = f"http://localhost:{self._server.server_port}"

    def bodies(self) -> list[str]:
        """Names of the files that were asked for with GET at their last address, in order."""
        return [
            asked.path.rpartition("/")[2]
            for asked in self.asked
            if asked.method == "GET" and not asked.path.startswith("/api/") and not self._redirected(asked.path)
        ]

    def _redirected(self, path: str) -> bool:
        return "/resolve/" in path and path.endswith(LARGE)

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def use_hub(hub: HubServer, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Make this process's hub and cache those of a test. The library has read its variables at its import."""
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache.parent / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setenv("NO_PROXY", NO_PROXY)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as the base class has it
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has read all that it wanted
            super().handle()

    def do_GET(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization", "")
        hub.asked.append(HubRequest(self.command, path, self.headers.get("Range", ""), authorization))
        if match := _LISTING.fullmatch(path):
            self._listing(*match.groups())
        elif match := _TREE.fullmatch(path):
            self._tree(*match.groups())
        elif match := _RESOLVE.fullmatch(path):
            self._resolve(*match.groups())
        elif path.startswith("/large/"):
            _, _, digest, name = path.split("/", 3)
            for repository in hub.repositories.values():
                if name in repository.files and repository.digest(name) == digest:
                    self._file(name, repository.files[name], {})
                    break
            else:
                self._say(403, {})
        else:
            self._say(404, {})

    def _found(self, name: str, revision: str, *, content: bool) -> Repository | None:
        """The repository, if this client may read it; else the refusal is sent."""
        hub, authorization = self.server_hub, self.headers.get("Authorization", "")
        repository, right = hub.repositories.get(name), authorization == f"Bearer {hub.token}"
        if repository is None or (repository.private and not right):
            if authorization and not right:
                self._say(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
            else:
                self._say(404 if right else 401, {"X-Error-Code": "RepoNotFound"} if right else {})
        elif repository.gated and content and not right:
            self._say(403 if authorization else 401, {"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", repository.commit):
            self._say(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return repository
        return None

    def _listing(self, name: str, revision: str) -> None:
        fault = self._fault("listing")
        if fault in WITHOUT_END:
            self._go_on(*WITHOUT_END[fault])
        elif fault.isdecimal():
            self._say(int(fault), {"Retry-After": "7200"} if fault == "429" else {})
        elif repository := self._found(name, revision, content=False):
            siblings = [self._sibling(repository, file) for file in sorted(repository.files)]
            answer = {"id": name, "sha": repository.commit, "siblings": siblings}
            content = json.dumps(answer).encode()
            if fault == "cut":
                self._begin(200, content, {}, len(content) // 2)
            else:
                self._send(200, content, {"Content-Type": "application/json"})

    def _tree(self, name: str, revision: str) -> None:
        if repository := self._found(name, revision, content=False):
            tree: list[dict[str, object]] = []
            for path in sorted(repository.files):
                size, digest = len(repository.files[path]), repository.digest(path)
                large = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}} if path.endswith(LARGE) else {}
                tree.append({"type": "file", "path": path, "size": size, "oid": digest[:40], **large})
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    def _sibling(self, repository: Repository, name: str) -> dict[str, object]:
        size, digest = len(repository.files[name]), repository.digest(name)
        if name in self.server_hub.without_digest:
            return {"rfilename": name, "size": size}
        if name.endswith(LARGE):
            large = {"sha256": digest, "size": size, "pointerSize": 134}
            return {"rfilename": name, "size": size, "blobId": "0" * 40, "lfs": large}
        return {"rfilename": name, "size": size, "blobId": digest}

    def _resolve(self, name: str, revision: str, file: str) -> None:
        hub = self.server_hub
        if not (repository := self._found(name, revision, content=True)):
            return
        if file not in repository.files:
            self._say(404, {"X-Error-Code": "EntryNotFound"})
            return
        content, digest = repository.files[file], repository.digest(file)
        about = {"X-Repo-Commit": repository.commit, "ETag": f'"{digest}"'}
        if file.endswith(LARGE):
            about |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"'}
            self._say(302, about | {"Location": f"{hub.elsewhere}/large/{digest}/{file}"})
        else:
            self._file(file, content, about)

    def _fault(self, what: str) -> str:
        return self.server_hub.faults[what].pop(0) if self.server_hub.faults[what] else ""

    def _file(self, name: str, content: bytes, about: Mapping[str, str]) -> None:
        hub, fault = self.server_hub, self._fault(name)
        if fault.startswith("to "):  # a redirect
            self._say(302, {"Location": fault.removeprefix("to ")})
            return
        if fault.isdecimal():
            self._say(int(fault), {"Retry-After": "0"})
            return
        if fault in WITHOUT_END:
            self._go_on(*WITHOUT_END[fault])
            return
        if fault == "changed":
            content = bytes(content[:-1]) + bytes([content[-1] ^ 1])
        if fault == "larger":
            content += b"more"
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and fault != "whole":
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            about = {**about, "Content-Range": f"bytes {first}-{last}/{len(content)}"}
            status, body = 206, content[first : last + 1]
        else:
            status, body = 200, content
        if fault == "endless":  # no length is announced, and more comes than was promised
            self.send_response(status)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body + b"more")
            self.close_connection = True
        elif fault in ("cut", "stall", "drip"):
            self._begin(status, body, about, 4096 if fault == "drip" else len(body) // 2)
            if fault == "stall":
                self.wfile.flush()
                hub.holding.set()
                hub.over.wait()
        else:
            self._send(status, body, about)

    def _go_on(self, begins: bytes, repeats: bytes) -> None:
        self.close_connection = True
        self.wfile.write(begins)
        while not self.server_hub.over.wait(0.02):
            self.wfile.write(repeats)

    def _begin(self, status: int, body: bytes, headers: Mapping[str, str], sent: int) -> None:
        """Announce the whole body and send its beginning; the connection ends afterwards."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[:sent])
        self.close_connection = True

    def _say(self, status: int, headers: Mapping[str, str]) -> None:
        self._send(status, b"", headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD" and body:
            self.wfile.write(body)
