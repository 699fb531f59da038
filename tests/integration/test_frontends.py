"""`headrace up --frontends 2 --routers 2`: processes that share a port come and go, and only one that is killed breaks
anything: the streams that were its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.stack import ROOT, Up, eventually, running
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("frontends")
    model = str(write_tiny_model(state / "tiny"))
    several = ("--frontends", "2", "--routers", "2", "--workers", "1")
    slow = ("--engine", "simulated", "--simulated", "fixed_s=0.02", "--simulated", "output_tokens=0")
    with running(state, *several, *slow, "--model", model, "--discovery", "file") as stack:
        yield stack


def addresses(up: Up) -> dict[str, str]:
    """Frontend → its own address; those that are up now."""
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(up.state)]
    shown: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return {row["instance"]: row["http"] for row in shown["instances"] if row["service"] == "frontend"}


def connections(address: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        shown = re.search(r"^headrace_open_connections\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert shown
    return float(shown[1])


def ask(up: Up, tokens: int, *, streams: bool) -> bytes:
    """All that is answered on a connection of its own."""
    url = urlsplit(up.url)
    body = json.dumps(
        {"model": "tiny", "prompt": "a b c", "max_tokens": tokens, "ignore_eos": True, "stream": streams}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    assert url.hostname
    assert url.port
    with socket.create_connection((url.hostname, url.port), timeout=LIMIT_S) as connection:
        connection.sendall(head.encode() + body)
        answer = bytearray()
        try:
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionResetError:
            pass
        return bytes(answer)


def restarted(up: Up, name: str, pid: int) -> None:
    def again() -> bool:
        program = up.record["programs"].get(name)
        if program is None or program["pid"] == pid:
            return False
        try:
            with urllib.request.urlopen(f"{program['observe']}/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    eventually(again, limit_s=LIMIT_S, what=f"{name} serves again")


def test_each_has_an_address_of_its_own_and_a_share_of_the_connections(up: Up) -> None:
    own = addresses(up)
    assert len(set(own.values())) == 2
    url = urlsplit(up.url)
    opened = [socket.create_connection((url.hostname or "", url.port or 0)) for _ in range(64)]
    eventually(lambda: sum(map(connections, own.values())) == 64, limit_s=LIMIT_S, what="all are accepted")
    assert all(connections(address) >= 8 for address in own.values())
    for connection in opened:
        connection.close()


def test_a_conversation_goes_on_at_whichever_of_them_a_connection_comes_to(up: Up) -> None:
    previous, keepers = None, set[str]()
    cached: list[int] = []
    url = urlsplit(up.url)
    while len(keepers) < 2 or len(cached) < 8:
        asked = {"model": "tiny", "input": "hello there", "max_output_tokens": 2, "previous_response_id": previous}
        request = urllib.request.Request(
            f"http://{url.netloc}/v1/responses", json.dumps(asked).encode(), {"Connection": "close"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # a connection of its own
            response: dict[str, Any] = json.load(answer)
        assert response["previous_response_id"] == previous
        previous = response["id"]
        keepers.add(previous.partition(".")[0])
        cached.append(response["usage"]["input_tokens_details"]["cached_tokens"])
        assert len(cached) < 64, "both of them get some"
    assert cached[-1] > cached[0], "former turns are found in the cache"


def test_one_that_drains_loses_nothing(up: Up) -> None:
    pid = up.pid("frontend-0")
    ended = Event()

    def keep_asking() -> list[bytes]:
        answers = []
        while not ended.is_set():
            answers.append(ask(up, 5, streams=False))
        return answers

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(ask, up, 100, streams=True) for _ in range(4)]
        askers = [pool.submit(keep_asking) for _ in range(4)]
        os.kill(pid, signal.SIGTERM)
        restarted(up, "frontend-0", pid)
        ended.set()
        answers = [answer for asker in askers for answer in asker.result()]
        assert answers
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert all(b"data: [DONE]" in stream.result() for stream in streams)


def test_one_that_is_killed_breaks_its_own_streams_only(up: Up) -> None:
    pid = up.pid("frontend-1")
    killed = up.record["programs"]["frontend-1"]["observe"]
    own = addresses(up)
    with ThreadPoolExecutor(24) as pool:
        streams = [pool.submit(ask, up, 400, streams=True) for _ in range(24)]
        eventually(lambda: sum(map(connections, own.values())) == 24, limit_s=LIMIT_S, what="all are connected")
        broken = connections(killed)
        os.kill(pid, signal.SIGKILL)
        answers = [stream.result() for stream in streams]
    assert sum(b"data: [DONE]" not in answer for answer in answers) == broken
    restarted(up, "frontend-1", pid)
    assert ask(up, 5, streams=False).startswith(b"HTTP/1.1 200")
