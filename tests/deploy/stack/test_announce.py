"""deploy/local/stack/announce.py: what `up` says until it is ready, with small real programs as children."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from deploy.local.stack import servers
from deploy.local.stack.announce import SharedTasks, health, say_ready
from deploy.local.stack.stack import AccessFiles, Launch, Stack
from deploy.local.stack.supervise import Program
from deploy.local.stack.up import Shell
from deploy.local.state import StateDirectory
from deploy.local.terminal import Terminal
from tests.deploy.stack.programs import LIMIT_S, STAYS, launch, until


def shown(tasks: SharedTasks, *steps: tuple[str, str, int]) -> list[tuple[str, str, int]]:
    return [step for step in steps if tasks.shows(*step)]


def test_of_several_services_that_do_the_same_one_shows_its_progress() -> None:
    first = [("worker-0", "converting", percent) for percent in (0, 10, 50, 100)]
    others = [(f"worker-{number}", "converting", percent) for number in (1, 2) for percent in (0, 60, 100)]
    mixed = [first[0], others[0], others[3], first[1], others[1], first[2], others[2], first[3], *others[4:]]
    assert shown(SharedTasks(), *mixed) == first


def test_another_service_goes_on_where_the_one_that_showed_it_has_left() -> None:
    tasks = SharedTasks()
    assert shown(tasks, ("worker-0", "converting", 40), ("worker-1", "converting", 50)) == [
        ("worker-0", "converting", 40)
    ]
    tasks.left("worker-0")
    rest = [("worker-1", "converting", percent) for percent in (40, 60, 100)]
    assert shown(tasks, *rest, ("worker-0", "converting", 10)) == rest[1:]


def test_each_of_several_tasks_has_a_service_that_shows_it() -> None:
    steps = [("worker-0", "converting", 10), ("worker-1", "mapping weights", 10), ("worker-0", "mapping weights", 20)]
    assert shown(SharedTasks(), *steps) == steps[:2]


class RolesUp:
    """A frontend that is ready, and a worker with a role that is not attached to the kvbm yet."""

    WHY = "attach: not_ready: making the pool's memory: 10 %"

    def __init__(
        self,
        state_dir: StateDirectory,
        capsys: pytest.CaptureFixture[str],
        *others: Launch,
        other_role: str = "",
    ) -> None:
        self._capsys = capsys
        self.printed, self.shown = "", ""
        self._folders = {name: state_dir.home / name for name in ("frontend", "prefill-0")}
        launches = list(others)
        for name, port in zip(self._folders, servers.free_ports(2), strict=True):
            self._folders[name].mkdir()
            serve = f"exec {sys.executable} -m http.server --bind 127.0.0.1 --directory {self._folders[name]} {port}"
            plain = launch(name, serve, observe=f"http://127.0.0.1:{port}")
            launches.append(msgspec.structs.replace(plain, hands_over=name == "prefill-0"))
        self._say("frontend", "{}")
        self._say("prefill-0", json.dumps({"ready": True, "no_hand_over": [self.WHY]}))
        stack = Stack(
            tuple(launches), {}, "http://here", "tiny", "nats://me:secret@there", "there:1", other_role=other_role
        )
        self.shell = Shell(stack, state_dir, Terminal())

    def attach(self) -> None:
        self._say("prefill-0", "{}")

    def _say(self, name: str, health: str) -> None:
        fresh = self._folders[name] / "fresh"
        fresh.write_text(health)
        fresh.rename(self._folders[name] / "health")

    async def until(self, met: Callable[[], bool]) -> None:
        def seen() -> bool:
            out, err = self._capsys.readouterr()
            self.printed += out
            self.shown += err
            return met()

        await until(seen)


async def test_ready_waits_until_workers_with_roles_are_attached_to_the_kvbm(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.local.stack.announce.HAND_OVER_WAIT_S", 10 * LIMIT_S)
    up = RolesUp(state_dir, capsys)
    running = asyncio.create_task(up.shell.run())
    await up.until(lambda: f"  prefill-0: not attached to the kvbm: {up.WHY}\n" in up.shown)
    assert not up.printed
    up.attach()
    await up.until(lambda: up.printed == "ready http://here/v1\n")
    up.shell.stop()
    assert await running == 0
    assert "hand-overs" not in up.shown


UNREADY_FOR_EVER = """
import signal, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
signal.signal(signal.SIGTERM, signal.SIG_IGN)
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""
"""It has no /health, and logs each question."""
UNREADY_AT_FIRST = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        served = os.path.exists("served")
        self.send_response(200 if served else 503)
        self.end_headers()
        if not served:
            self.wfile.write(b'{"reasons": ["model tiny: its workers have the role prefill, and none decodes"]}')
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
"""A frontend that serves nothing before there is a file `served`."""


async def test_a_stack_that_stops_while_it_waits_for_hand_overs_is_not_called_ready(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.local.stack.announce.HAND_OVER_WAIT_S", 10 * LIMIT_S)
    (port,) = servers.free_ports(1)
    arguments = (sys.executable, "-c", UNREADY_FOR_EVER, str(port))
    router = Launch(Program("router", 2, 1000.0), arguments, f"http://127.0.0.1:{port}")
    up = RolesUp(state_dir, capsys, router)
    running = asyncio.create_task(up.shell.run())
    await up.until(lambda: f"  prefill-0: not attached to the kvbm: {up.WHY}\n" in up.shown)
    log = state_dir.logs / "router.log"
    await up.until(lambda: "GET /health" in log.read_text())  # from then on it ignores SIGTERM
    up.shell.stop()
    await up.until(lambda: "  router: draining\n" in up.shown)
    asked = log.read_text().count("GET /health")
    await up.until(lambda: log.read_text().count("GET /health") >= asked + 3)
    up.shell.stop()
    assert await running == 0
    assert not up.printed


async def test_a_worker_that_is_not_attached_in_time_is_named_before_ready_and_when_it_is_ready(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.local.stack.announce.HAND_OVER_WAIT_S", 0.0)
    up = RolesUp(state_dir, capsys)
    running = asyncio.create_task(up.shell.run())
    await up.until(lambda: up.printed == "ready http://here/v1\n")
    await up.until(lambda: "prefill-0 takes no part in hand-overs yet: " in up.shown)
    up.attach()
    await up.until(lambda: "prefill-0 is ready now\n" in up.shown)
    up.shell.stop()
    assert await running == 0


NO_DECODE = "model tiny: its workers have the role prefill, and none decodes"


async def test_an_up_with_one_role_says_that_it_has_joined_while_the_fleet_lacks_the_other_and_ready_after_that(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.local.stack.announce.JOIN_WAIT_S", 0.0)
    (port,) = servers.free_ports(1)
    frontend = Launch(
        Program("frontend-0", 0, 10.0), (sys.executable, "-c", UNREADY_AT_FIRST, str(port)), f"http://127.0.0.1:{port}"
    )
    up = RolesUp(state_dir, capsys, frontend, other_role="decode")
    running = asyncio.create_task(up.shell.run())
    await up.until(lambda: f"  frontend-0: {NO_DECODE}\n" in up.shown)
    assert not up.printed
    up.attach()
    await up.until(lambda: up.printed == "joined nats://there\n")
    await up.until(lambda: f"but no request is served yet: {NO_DECODE}.\n" in up.shown)
    await up.until(lambda: "start `up` with --decode and the same NATS and etcd." in up.shown)
    (state_dir.run / "served").touch()
    await up.until(lambda: up.printed == "joined nats://there\nready http://here/v1\n")
    up.shell.stop()
    assert await running == 0
    assert "kvbm.peers.listen" in up.shown


async def test_an_up_that_joins_a_fleet_with_the_other_role_is_ready_as_always(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    listens = launch("kvbm", STAYS)
    listens = msgspec.structs.replace(listens, arguments=(*listens.arguments, "--peers.listen=127.0.0.1:7400"))
    up = RolesUp(state_dir, capsys, listens, other_role="decode")
    up.attach()
    running = asyncio.create_task(up.shell.run())
    await up.until(lambda: up.printed == "ready http://here/v1\n")
    up.shell.stop()
    assert await running == 0
    assert "kvbm.peers.listen" not in up.shown


async def test_a_program_of_several_services_is_ready_when_all_are_and_says_what_the_first_one_lacks() -> None:
    bodies = {"worker": {"reasons": ["loading: 10 %"]}, "frontend": {"reasons": ["no worker is there"]}}

    async def answer(request: web.Request) -> web.Response:
        body = bodies[request.match_info["name"]]
        return web.json_response(body, status=503 if body.get("reasons") else 200)

    app = web.Application()
    app.router.add_get("/{name}/health", answer)
    async with TestServer(app) as server:
        urls = [str(server.make_url(name)) for name in bodies]
        program = msgspec.structs.replace(launch("single", STAYS, observe=urls[1]), also=(urls[0],))
        assert await health(program) == (False, "loading: 10 %")
        bodies["worker"] = {"notes": ["little room"]}
        assert await health(program) == (False, "no worker is there")
        bodies["frontend"] = {}
        assert await health(program) == (True, "little room")
        bodies["frontend"] = {"models": ["a", "c"]}
        door = launch("frontend", STAYS, observe=urls[1])
        assert await health(door, models=("a", "b", "d")) == (False, "it does not know b, d yet")
        assert await health(door, models=("a",)) == (True, "")
    assert await health(program) == (False, "")


async def test_one_process_is_said_to_be_ready_without_the_commands_that_cannot_reach_it(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    up = RolesUp(state_dir, capsys)
    (frontend, _) = up.shell.stack.launches
    single = msgspec.structs.replace(frontend, program=Program("single", 0, 10.0))
    shell = Shell(Stack((single,), {}, "http://here", "tiny", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await up.until(lambda: up.printed == "ready http://here/v1\n")
    await up.until(lambda: "page:    http://here/ui\n" in up.shown)
    assert "status:" not in up.shown
    assert json.loads(state_dir.record.read_text())["single"] is True
    shell.stop()
    assert await running == 0


def test_what_is_asked_of_an_engine_of_pictures_is_a_picture_or_a_video(capsys: pytest.CaptureFixture[str]) -> None:
    say_ready("http://here", "wan", AccessFiles(), "", "", "logs", makes_pictures=True)
    shown = capsys.readouterr().err
    assert "curl http://here/v1/images/generations " in shown
    assert "curl http://here/v1/videos " in shown
