"""deploy/compose/haproxy.cfg in a real HAProxy before two real frontends: they come and go, and no request is lost.

The configuration is the very file; only addresses change, and how long a check may take. Docker's name server is a
thread here, and the frontends are at two addresses of the loopback network, as containers are at two of a bridge.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.frontend.config import FrontendConfig
from shared.config import load
from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import ROOT, eventually
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

COMPOSE = ROOT / "deploy" / "compose"
HAPROXY = shutil.which("haproxy", path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin")
LIMIT_S = 180.0
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")


class Names:
    """A name server that knows where the frontends are, and nothing else."""

    def __init__(self) -> None:
        self.addresses = ["127.0.0.2", "127.0.0.3"]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            asked, client = self._socket.recvfrom(4096)
            if not asked:
                return
            end = asked.index(b"\0", 12) + 5
            found = self.addresses if asked[end - 4 : end - 2] == b"\0\1" else []
            head = asked[:2] + struct.pack(">HHHHH", 0x8180, 1, len(found), 0, 0)
            records = [b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(address) for address in found]
            self._socket.sendto(head + asked[12:end] + b"".join(records), client)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()


class Balanced:
    """A balancer, and the services after it."""

    def __init__(self, services: Fleet, port: int) -> None:
        self.services = services
        self.port = port
        """Port of the frontends, each at its own address."""
        self.api = free_port()
        self.own = free_port()

    def start(self, number: int) -> None:
        """One of the two frontends, with the delay of the compose file's."""
        delay_s = load(FrontendConfig, file=COMPOSE / "frontend.toml", environ={}).http.drain_delay_s
        where = ("--http-host", f"127.0.0.{number + 1}", "--http-port", str(self.port))
        self.services.start("frontend", f"frontend {number}", *where, "--http-drain-delay-s", str(delay_s))

    def listens(self) -> bool:
        """Whether the balancer does, for clients and for us."""
        for port in (self.api, self.own):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) != 0:
                    return False
        return True

    def ready(self) -> int:
        """The frontends that the balancer gives requests to."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.own}/ready", timeout=LIMIT_S) as answer:
            return int(answer.read())

    def wait(self, ready: int) -> None:
        eventually(lambda: self.ready() == ready, limit_s=LIMIT_S, what=f"the balancer sees {ready} frontends")

    def ask(self, path: str = "/v1/completions", **body: object) -> tuple[int, bytes]:
        """Status and body, on a connection of its own."""
        asked = {"model": "tiny", "prompt": "a b c", "max_tokens": 8, "ignore_eos": True} | body
        request = urllib.request.Request(f"http://127.0.0.1:{self.api}{path}", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()

    def inflight(self) -> float:
        return sum(self.services.services[f"frontend {one}"].metric("headrace_inflight_requests") for one in (1, 2))


@contextmanager
def balancer(folder: Path, one: Balanced, names: Names) -> Iterator[None]:
    text = (COMPOSE / "haproxy.cfg").read_text(encoding="utf-8")
    for theirs, ours in (
        ("parse-resolv-conf", f"nameserver dns 127.0.0.1:{names.port}"),
        ("bind :8000", f"bind 127.0.0.1:{one.api}"),
        ("bind :9100", f"bind 127.0.0.1:{one.own}"),
        ("frontend:8000", f"frontend:{one.port}"),
        ("    http-check expect", "    timeout check 60s\n    http-check expect"),  # this machine may be slow
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    (folder / "haproxy.cfg").write_text(text, encoding="utf-8")
    assert HAPROXY is not None
    with (folder / "haproxy.log").open("ab") as log:
        running = subprocess.Popen([HAPROXY, "-db", "-f", str(folder / "haproxy.cfg")], stdout=log, stderr=log)
    try:
        eventually(one.listens, limit_s=LIMIT_S, what="the balancer listens")
        yield
    finally:
        running.kill()
        running.wait()


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Balanced]:
    folder = tmp_path_factory.mktemp("balancer")
    model = str(write_tiny_model(folder / "tiny"))
    names = Names()
    where = ("--discovery-backend", "file", "--discovery-path", str(folder / "discovery"))
    try:
        with fleet(folder, nats_url, "--namespace", "balanced", *where) as services:
            one = Balanced(services, free_port())
            slow = ("--engine", "simulated", "--simulated-fixed-s", "0.02", "--simulated-output-tokens", "0")
            services.start("router", "router")
            services.start("worker", "worker", "--model", model, *slow)
            with balancer(folder, one, names):
                yield one
    finally:
        names.close()


@pytest.fixture
def both(balanced: Balanced) -> Balanced:
    """With both frontends ready, whatever a test before did."""
    for number in (1, 2):
        service = balanced.services.services.get(f"frontend {number}")
        if service is None or service.process.poll() is not None:
            balanced.start(number)
    balanced.services.wait_ready()
    balanced.wait(2)
    return balanced


def test_while_no_frontend_is_there_clients_get_the_answer_that_a_frontend_would_give(balanced: Balanced) -> None:
    status, body = balanced.ask()
    assert status == 503
    assert json.loads(body)["error"]["message"] == "no frontend answers"


def test_a_stream_comes_as_it_is_computed_and_ends_with_its_client(both: Balanced) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", both.api), timeout=LIMIT_S) as client:
        client.sendall(head.encode() + body)
        came = b""
        while b"data: " not in came:
            came += client.recv(4096)
        assert both.inflight() == 1, "its first event came before its last was computed"
    eventually(lambda: both.inflight() == 0, limit_s=LIMIT_S, what="the request has ended with its client")


def test_a_body_over_the_limit_is_refused_as_by_the_frontend(both: Balanced) -> None:
    status, body = both.ask(prompt="x" * (5 << 20))
    assert status == 413
    assert json.loads(body)["error"]["code"] == "request_too_large"


def test_requests_after_a_frontend_was_killed_go_to_the_other(both: Balanced) -> None:
    killed = both.services.services["frontend 1"].process
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert [both.ask()[0] for _ in range(20)] == [200] * 20, "the balancer finds a refused port, and asks the other"


def test_frontends_restarted_in_turn_lose_no_request(both: Balanced) -> None:
    answers: list[tuple[int, bytes]] = []
    ended = threading.Event()

    def client(number: int) -> None:
        while not ended.is_set():
            answers.append(both.ask(stream=number % 2 == 0, max_tokens=8 if number < 2 else 100))

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(client, number) for number in range(4)]
        try:
            for number in (1, 2):
                due = len(answers) + 8
                eventually(lambda due=due: len(answers) >= due, limit_s=LIMIT_S, what="answers")  # type: ignore[misc]
                assert both.services.services[f"frontend {number}"].stop()[0] == 0
                both.start(number)
                both.services.wait_ready(f"frontend {number}")
                both.wait(2)
        finally:
            ended.set()
        for one in asking:
            one.result()
    assert {status for status, _ in answers} == {200}
    assert all(body.endswith(b"data: [DONE]\n\n") for _, body in answers if body.startswith(b"data: "))
