"""`headrace explain`, and the routers in `headrace status`, with a real NATS and routers that only answer those."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local import cli
from deploy.local.show import fleet
from deploy.local.stack.stack import toml
from services.router.queries import requested_id
from shared import subjects
from shared.bus.contract import Message
from shared.bus.nats_bus import connect
from shared.config import NatsConfig
from shared.discovery.file import FileDiscovery
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.people import (
    EXPLANATIONS,
    ROUTER_STATE,
    Explanation,
    Explanations,
    ModelState,
    RouterState,
    SourceState,
)
from shared.messages.select import Candidate, Overlap
from tests.servers import nats_server

ROW = Candidate("w1", 0, Overlap(3), 1.5, 7, 80, "most cached")


def choice(request: str, attempt: int, router: str, age_s: float) -> Explanation:
    return Explanation("m", router, request, attempt, age_s, "w1", 0, "most cached", (ROW,), 64, 48)


KNOWN = {
    "r1": [choice("abc", 1, "r1", 9.0), choice("other", 1, "r1", 5.0)],
    "r2": [choice("abc", 2, "r2", 7.0)],
}


class Fleet:
    """Routers in a thread of their own, as the command has its own loop."""

    def __init__(self, url: str, directory: Path, routers: Mapping[str, list[Explanation]], *, silent: str) -> None:
        self._url = url
        self._directory = directory
        self._routers = routers
        self._silent = silent
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        bus = await connect(NatsConfig(url=self._url), "test")
        discovery = FileDiscovery(self._directory)
        entries: dict[str, bytes] = {}
        for router, known in self._routers.items():
            address = Instance("default", "router", router, 1, "here", 7, 0.0, "0")
            entries[subjects.instance_key("default", "router", router)] = INSTANCE.encode(address, JSON_HEADER)
            if router == self._silent:
                continue

            async def explain(message: Message, router: str = router, known: list[Explanation] = known) -> None:
                request = requested_id(message.payload)
                found = [each for each in known if request in ("", each.request)]
                answer = EXPLANATIONS.encode(Explanations(router, found), JSON_HEADER)
                await bus.publish(message.reply, answer, headers=JSON_HEADER)

            async def state(message: Message, router: str = router) -> None:
                sources = [SourceState("w1", "live")]
                told = RouterState(router, "kv", [ModelState("m", 1, 2, 30, 4000)], sources)
                await bus.publish(message.reply, ROUTER_STATE.encode(told, JSON_HEADER), headers=JSON_HEADER)

            await bus.subscribe(subjects.explain("default", router), explain)
            await bus.subscribe(subjects.router_state("default", router), state)
        registration = await discovery.register(lambda _epoch: entries)
        self._ready.set()
        await self._ended.wait()
        await registration.close()
        await discovery.close()
        await bus.drain()


@contextmanager
def running(
    directory: Path, routers: Mapping[str, list[Explanation]], *, silent: str = "", nats: bool = True
) -> Iterator[list[str]]:
    """The flags by which a command finds the fleet, in an `up`'s own record."""
    with nats_server(directory) as server:
        peers = Fleet(server.url, directory / "discovery", routers, silent=silent)
        peers.start()
        record = directory / "state" / "run" / "up.json"
        record.parent.mkdir(parents=True)
        url = server.url if nats else "nats://127.0.0.1:1"
        record.write_text(json.dumps({"nats": url}))
        files = {"backend": "file", "path": str(directory / "discovery")}
        record.with_name("fleet.toml").write_text(toml({"nats": {"url": url}, "discovery": files}))
        try:
            yield ["--state", str(directory / "state")]
        finally:
            peers.stop()


def test_a_request_is_explained_by_all_routers_that_took_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, KNOWN) as servers:
        assert cli.main(["explain", "chatcmpl-abc", *servers]) == 0
        said = capsys.readouterr()
        heads = [line for line in said.out.splitlines() if line.startswith(("request", "model"))]
        assert heads == [
            "request abc, attempt 1, 9s ago",
            "model m, chosen by router r1: most cached",
            "request abc, attempt 2, 7s ago",
            "model m, chosen by router r2: most cached",
        ]
        assert not said.err
        assert cli.main(["explain", "abc", "--json", *servers]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [(each["router"], each["candidates"][0]["overlap"]) for each in told["decisions"]] == [
            ("r1", [3, 0, 0, 0]),
            ("r2", [3, 0, 0, 0]),
        ]
        assert cli.main(["explain", *servers]) == 0
        assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
            ["AGO", "REQUEST"],
            ["9s", "abc"],
            ["7s", "abc"],
            ["5s", "other"],
        ]


def test_an_unknown_request_is_reported_in_one_line_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, KNOWN) as servers:
        assert cli.main(["explain", "never", *servers]) == 1
        said = capsys.readouterr()
        assert said.err == "error: no process remembers never: it did not arrive, or too long ago\n"
        assert not said.out


@pytest.mark.parametrize(
    ("name", "shown"),
    [(" ", "' '"), ("", "''"), ('"\n"', "'\"\\n\"'"), ("\udcff\udcfe", r"'\udcff\udcfe'"), ("chatcmpl-",) * 2],
)
def test_a_blank_name_is_an_unknown_request(
    name: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, KNOWN) as servers:
        assert cli.main(["explain", name, *servers]) == 1
        said = capsys.readouterr()
        assert said.err == f"error: no process remembers {shown}: it did not arrive, or too long ago\n"
        assert not said.out


def test_a_router_that_does_not_answer_is_a_note_and_status_shows_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, KNOWN, silent="r2") as servers:
        assert cli.main(["explain", "abc", *servers]) == 0
        said = capsys.readouterr()
        assert "attempt 1" in said.out
        assert said.err.startswith("note: router r2: ")
        assert cli.main(["status", *servers]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert "r1      kv      2         30            4 kB        1 live" in shown
        assert shown[-1].startswith("note: router r2: ")


@pytest.mark.parametrize(
    ("routers", "silent", "said"),
    [({}, "", "error: no process answers: none is registered"), (KNOWN, "r1", "")],
)
def test_without_routers_the_error_says_so(
    routers: Mapping[str, list[Explanation]],
    silent: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only = {"r1": routers["r1"]} if routers else {}
    with running(tmp_path, only, silent=silent) as servers:
        assert cli.main(["explain", "abc", *servers]) == 1
        assert capsys.readouterr().err.startswith(said or "error: no process answers: router r1: ")
        assert cli.main(["explain", *servers]) == 1
        assert capsys.readouterr().err.startswith(
            ("error: no router is registered in files in ", "error: no router an")
        )
        assert cli.main(["explain", "block", 16 * "0", *servers]) == 1
        assert capsys.readouterr().err.startswith("error: no worker and no block store is registered in files in ")


def test_without_nats_the_error_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "CONNECT_LIMIT_S", 0.2)
    with running(tmp_path, KNOWN, nats=False) as servers:
        assert cli.main(["explain", "abc", *servers]) == 1
        assert capsys.readouterr().err == "error: NATS did not answer within 0.2 s at nats://127.0.0.1:1\n"
