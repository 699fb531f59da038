"""deploy/local/show/status.py: what it asks the frontends. The other tests of `status` run a whole `up`."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from deploy.local import cli
from deploy.local.show.status import fit, model_faults
from services.frontend.metrics import Metrics
from shared import subjects
from shared.config import ObserveConfig
from shared.discovery.file import FileLease
from shared.messages.cards import INSTANCE, Instance, ServiceName
from shared.messages.codec import JSON_HEADER
from shared.runtime.observe import ProcessHealth, serving
from shared.runtime.runtime import pid_namespace
from tests.deploy.up_state import up_state
from tests.servers import free_port

FAULT = "model m: the chat template, line 1: unexpected '}'"
ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 180.0


async def test_a_frontend_that_cannot_serve_a_model_says_why() -> None:
    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"reasons": ["the bus is down", FAULT]}, status=503)

    app = web.Application()
    app.router.add_get("/health", health)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert await model_faults("f1", f"http://127.0.0.1:{port}") == [f"frontend f1: {FAULT}"]
        assert await model_faults("f1", f"http://127.0.0.1:{port}/other") == []
    finally:
        await runner.cleanup()
    assert await model_faults("f1", f"http://127.0.0.1:{port}") == []


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """What an `up` has written that runs with discovery in files."""
    with up_state(tmp_path) as state:
        yield state


def entry(service: ServiceName, name: str, http: str) -> tuple[str, bytes]:
    value = Instance("default", service, name, 1, "machine", 42, 1.0, "0.1.0", http=http)
    return subjects.instance_key("default", service, name), INSTANCE.encode(value, JSON_HEADER)


def command(state: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "deploy.local.cli", "status", "--state", str(state), "--watch", "0.2"]


async def shown(watching: Process, *texts: str) -> None:
    """Read lines until each text was in one."""
    assert watching.stdout is not None
    missing, seen = set(texts), ""
    while missing:
        async with asyncio.timeout(LIMIT_S):
            line = (await watching.stdout.readline()).decode()
        seen += line
        assert line, f"ended without {missing}: {seen}"
        missing = {text for text in missing if text not in line}


async def test_requests_are_seen_and_a_process_that_goes_away(state: Path) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    lease = FileLease(state / "run" / "discovery")
    loopback = ObserveConfig(port=0)
    async with (
        serving(loopback, ProcessHealth(), registry) as frontend,
        AsyncExitStack() as router_runs,
    ):
        router = await router_runs.enter_async_context(serving(loopback, ProcessHealth(), CollectorRegistry()))
        entries = dict([entry("frontend", "f1", frontend), entry("router", "r1", router)])
        lease.write(entries)
        watching = await create_subprocess_exec(*command(state), cwd=ROOT, stdout=PIPE)
        await shown(watching, "every 0.2 s", "REQUESTS/S", "frontend  f1", "router    r1")
        metrics.count_request("chat", 200, "m", 0.5)
        metrics.of_model("m").first_token.observe(0.03)
        await shown(watching, " ms ")

        await router_runs.aclose()
        await shown(watching, f"no answer: router r1 at {router}/metrics: ")
        lease.write(dict([entry("frontend", "f1", frontend)]))
        await shown(watching, "gone: router r1, ")
        watching.send_signal(signal.SIGINT)
        assert await watching.wait() == 0
    lease.close()


def test_a_killed_process_of_this_machine_is_gone_and_no_other_is(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killed.kill()
    killed.communicate()
    here = Instance("default", "worker", "w0", 1, socket.gethostname(), killed.pid, 1.0, "0", http="http://127.0.0.1:9")
    here = replace(here, pid_namespace=pid_namespace())
    entries = [
        here,
        replace(here, instance="w1", pid=os.getpid()),
        replace(here, instance="w2", machine="another"),
        replace(here, instance="w3", pid_namespace=0),
        replace(here, service="router", instance="r0"),
    ]
    lease = FileLease(state / "run" / "discovery")
    keys = [subjects.instance_key("default", each.service, each.instance) for each in entries]
    lease.write({key: INSTANCE.encode(each, JSON_HEADER) for key, each in zip(keys, entries, strict=True)})
    assert cli.main(["status", "--state", str(state)]) == 0
    lease.close()
    shown = capsys.readouterr().out
    pids = {row[1]: row[3] for line in shown.splitlines() if (row := line.split())[:1] in (["worker"], ["router"])}
    alone = {"w1": str(os.getpid()), "w2": str(killed.pid), "w3": str(killed.pid)}
    assert pids == {"w0": "gone", "r0": "gone", **alone}
    assert "gone: the process has ended; it is listed until its lease ends, about 10 s" in shown


def test_a_terminal_shows_one_view_in_place_of_the_other(state: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, command(state), os.environ | {"TERM": "xterm", "NO_COLOR": "1"})
    seen = b""
    while seen.count(b"\033[J") < 2:
        seen += os.read(terminal, 4096)
    assert seen.startswith(b"\033[H")
    assert seen.count(b"\033[H") - seen.count(b"\033[J") in (0, 1), "a third view may have begun"
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--watch", "0"], "error: --watch is 0.2 to 3600 seconds"),
        (["--watch", "nan"], "error: --watch is 0.2 to 3600 seconds"),
        (["--watch", "--json"], "error: --watch shows tables: leave out --json"),
    ],
)
def test_wrong_usage_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", *words]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_a_view_is_cut_to_the_terminal() -> None:
    assert fit("a\nb\nc", 80, 3) == "a\nb\nc"
    assert fit("long line\nb\nc\nd", 4, 3) == "long\nb\n… 2 more lines"
