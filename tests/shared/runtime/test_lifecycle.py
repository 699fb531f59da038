"""A service's process: ready, drained, forced, crashed, refused. Each test runs a real one against a real NATS."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from shared import subjects
from shared.bus.nats_bus import connect
from shared.config import NatsConfig
from shared.messages.control import PING, PONG, Ping
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_SETTINGS, settle_memory
from tests.servers import NatsServer, free_port, nats_server

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0


class Child:
    """The process and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""

    async def logged(self, text: str) -> str:
        """Reads the log until a line with `text`, which is returned."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while True:
                line = (await self.process.stderr.readline()).decode()
                self.log += line
                if text in line:
                    return line
                assert line, f"the log ended without {text!r}:\n{self.log}"

    async def ended(self) -> int:
        """The exit status."""
        _, log = await asyncio.wait_for(self.process.communicate(), DEADLINE_S)
        self.log += log.decode()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def running(*words: str) -> AsyncIterator[Child]:
    """A program of the tests, as `python -m` takes it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
        stderr=asyncio.subprocess.PIPE,
    )
    child = Child(process)
    try:
        yield child
    finally:
        if process.returncode is None:
            process.kill()
            await child.ended()


def started(tmp_path: Path, *flags: str) -> AbstractAsyncContextManager[Child]:
    where = ("--discovery-backend", "file", "--discovery-path", str(tmp_path / "discovery"))
    return running("tests.shared.small_service", *where, "--observe-url-file", str(tmp_path / "url"), *flags)


async def get(tmp_path: Path, path: str, name: str = "url") -> tuple[int, str]:
    url = (tmp_path / name).read_text().strip()
    async with aiohttp.ClientSession() as session, session.get(url + path) as answer:
        return answer.status, await answer.text()


async def ready(tmp_path: Path) -> None:
    """Polls /health as a supervisor does."""
    await health(tmp_path, lambda status, _: status == 200)


async def health(tmp_path: Path, enough: Callable[[int, str], bool], name: str = "url") -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                if enough(*await get(tmp_path, "/health", name)):
                    return
            except (OSError, aiohttp.ClientError):
                pass  # not there yet
            await asyncio.sleep(0.05)


async def test_a_drained_process_ends_with_0(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url) as child:
        await ready(tmp_path)
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == 0
    assert "draining" in child.log
    assert "Traceback" not in child.log


async def test_interrupting_drains_too_and_ends_tasks_that_are_left(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url, "--mode", "idle tasks") as child:
        await ready(tmp_path)
        child.process.send_signal(signal.SIGINT)
        assert await child.ended() == 0


async def test_a_second_signal_ends_a_process_that_does_not_drain(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url, "--mode", "stubborn") as child:
        await ready(tmp_path)
        child.process.send_signal(signal.SIGTERM)
        await child.logged("draining")
        status, body = await get(tmp_path, "/health")
        assert (status, json.loads(body)) == (503, {"ready": False, "reasons": ["draining"]})
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == EXIT_FAILED


@pytest.mark.parametrize("mode", ["stubborn", "uncancellable"])
async def test_a_process_that_does_not_drain_ends_at_its_limit(tmp_path: Path, nats_url: str, mode: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url, "--mode", mode, "--drain-limit-s", "0.1") as child:
        await ready(tmp_path)
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == EXIT_FAILED
    assert "not drained in 0.1 s" in child.log


async def test_what_it_shows_of_itself(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url, "--namespace", "shown") as child:
        await ready(tmp_path)
        assert await get(tmp_path, "/live") == (200, "live\n")
        status, text = await get(tmp_path, "/metrics")
        assert status == 200
        labels = re.search(r"^headrace_small_starts_total\{(.*)\} 1.0$", text, re.MULTILINE)
        assert labels is not None
        assert re.fullmatch(r'instance="[0-9a-f]{16}",namespace="shown",service="worker"', labels[1])
        instance = labels[1][10:26]
        bus = await connect(NatsConfig(url=nats_url), "test")
        where = subjects.control("shown", "worker", instance)
        pong = PONG.decode((await bus.request(where, PING.encode(Ping()), timeout_s=DEADLINE_S)).payload)
        assert (pong.instance, pong.progress, pong.publishes) == (instance, 42, None)
        pong = PONG.decode((await bus.request(where, PING.encode(Ping("a key")), timeout_s=DEADLINE_S)).payload)
        assert pong.publishes is False
        await bus.drain()
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == 0
    for line in child.log.splitlines():
        assert re.match(rf'time=\S+Z level=\w+ service=worker instance={instance} logger=\S+ message="', line), line


async def test_its_metrics_page_shows_no_series_of_when_a_counter_was_made(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url) as child:
        await ready(tmp_path)
        _, text = await get(tmp_path, "/metrics")
        assert "headrace_small_starts_total{" in text
        assert "_created" not in text
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == 0


async def test_garbage_at_its_control_subject_is_counted_and_logged_once(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url, "--namespace", "noisy") as child:
        await ready(tmp_path)
        _, text = await get(tmp_path, "/metrics")
        found = re.search(r'^headrace_unreadable_messages_total\{instance="(\w+)".*\} 0.0$', text, re.MULTILINE)
        assert found is not None
        bus = await connect(NatsConfig(url=nats_url), "test")
        where = subjects.control("noisy", "worker", found[1])
        for _ in range(200):
            await bus.publish(where, b"\xc1 not msgpack")
        await bus.request(where, PING.encode(Ping()), timeout_s=DEADLINE_S)
        await bus.drain()
        _, text = await get(tmp_path, "/metrics")
        assert re.search(r"^headrace_unreadable_messages_total\{.*\} 200.0$", text, re.MULTILINE)
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == 0
    assert child.log.count(where) == 2  # the subscription's name and the message's, in one line
    assert child.log.count("unreadable message") == 1
    assert "Traceback" not in child.log


async def test_a_process_that_nats_refuses_says_so_and_which_settings_to_set(tmp_path: Path) -> None:
    with nats_server(tmp_path, 'authorization { users = [{ user: "u", password: "p" }] }') as server:
        async with started(tmp_path, "--nats-url", server.url) as child:
            await health(tmp_path, lambda status, body: status == 503 and "HEADRACE_NATS_PASSWORD" in body)
            child.process.send_signal(signal.SIGTERM)
            assert await child.ended() == 0
    assert "Authorization Violation" in child.log


async def test_a_process_without_nats_is_live_and_says_what_it_waits_for(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    async with started(tmp_path, "--nats-url", server.url) as child:
        await health(tmp_path, lambda status, body: status == 503 and "waiting for NATS" in body)
        assert (await get(tmp_path, "/live"))[0] == 200
        await asyncio.to_thread(server.start)
        try:
            await ready(tmp_path)
        finally:
            server.kill()
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == 0


async def test_a_process_that_was_ready_is_so_again_after_nats_refused_connections_for_a_while(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        async with started(tmp_path, "--nats-url", server.url) as child:
            await ready(tmp_path)
            server.kill()
            await child.logged("waiting for NATS")
            await asyncio.to_thread(server.start)
            await ready(tmp_path)
            child.process.send_signal(signal.SIGTERM)
            assert await child.ended() == 0


async def test_a_process_that_still_waits_for_nats_ends_when_asked(tmp_path: Path) -> None:
    async with started(tmp_path, "--nats-url", f"nats://127.0.0.1:{free_port()}") as child:
        await child.logged("waiting for NATS")
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == 0


async def test_a_crash_is_logged_and_ends_with_1(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url, "--mode", "crash") as child:
        assert await child.ended() == EXIT_FAILED
    assert "ValueError: a bug" in child.log


async def test_a_model_that_cannot_be_served_is_one_line_and_2(tmp_path: Path, nats_url: str) -> None:
    async with started(tmp_path, "--nats-url", nats_url, "--mode", "model") as child:
        assert await child.ended() == EXIT_SETTINGS
    assert child.log.splitlines()[-1] == "headrace-worker: model.safetensors: torn"
    assert "Traceback" not in child.log


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--nats-url", "nonsense"), "nats.url"),
        (("--unknown", "flag"), "--unknown: no such setting"),
        (("--observe-log-level", "chatty"), "log_level"),
        (("--discovery-backend", "paper"), "paper"),
        (("--observe-host", "192.0.2.1"), "cannot listen"),
        (("--namespace", "prod.>"), "namespace"),
    ],
)
async def test_wrong_settings_are_one_line_and_2(
    tmp_path: Path, nats_url: str, flags: tuple[str, ...], told: str
) -> None:
    async with started(tmp_path, "--nats-url", nats_url, *flags) as child:
        assert await child.ended() == EXIT_SETTINGS
    assert told in child.log.splitlines()[-1]
    assert "Traceback" not in child.log


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--check",), ""),
        (("--check", "--mode", "model"), "model.safetensors: torn"),
        (("--check-settings", "--mode", "model"), ""),
        (("--check-settings", "--unknown", "flag"), "--unknown: no such setting"),
        (("--namespace", "prod.>", "--check"), "namespace"),
        (("--observe-host", "192.0.2.1", "--check"), "observe.host: 192.0.2.1 is no address of this machine"),
        (("--trace-endpoint", "http://127.0.0.1:1/v1/traces", "--check"), ""),
    ],
)
async def test_a_service_that_is_asked_to_check_starts_nothing(
    tmp_path: Path, flags: tuple[str, ...], reason: str
) -> None:
    async with started(tmp_path, "--nats-url", "nats://127.0.0.1:1", *flags) as child:
        assert await child.ended() == (EXIT_SETTINGS if reason else 0)
    assert reason in child.log
    assert child.log.count("\n") == bool(reason)
    assert not (tmp_path / "url").exists()


async def test_a_taken_port_is_a_wrong_setting(tmp_path: Path, nats_url: str) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = str(taken.getsockname()[1])
        async with started(tmp_path, "--nats-url", nats_url, "--observe-port", port) as child:
            assert await child.ended() == EXIT_SETTINGS
    assert f"127.0.0.1:{port}" in child.log.splitlines()[-1]


def test_the_collector_looks_at_what_came_after_memory_was_settled_and_at_nothing_else() -> None:
    before: list[object] = []
    before.append(before)
    thresholds = gc.get_threshold()
    try:
        settle_memory()
        after: list[object] = []
        after.append(after)
        seen = [one for one in gc.get_objects() if one is before or one is after]
        assert len(seen) == 1
        assert seen[0] is after
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def two_started(tmp_path: Path, *flags: str, of_second: tuple[str, ...] = ()) -> AbstractAsyncContextManager[Child]:
    """Two small services in one process; their addresses are in the files `url` and `second`."""
    first = ("tests.shared.small_services", "--observe-url-file", str(tmp_path / "url"), *flags)
    return running(*first, "--", "--observe-url-file", str(tmp_path / "second"), *of_second)


async def both_ready(tmp_path: Path) -> None:
    for name in ("url", "second"):
        await health(tmp_path, lambda status, _: status == 200, name)


async def test_two_services_of_one_process_drain_in_turn(tmp_path: Path) -> None:
    async with two_started(tmp_path) as child:
        await both_ready(tmp_path)
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == 0
    drained = [line for line in child.log.splitlines() if "has drained" in line]
    assert ["frontend" in line for line in drained] == [True, False], child.log
    assert "Traceback" not in child.log


async def test_the_second_service_of_a_process_serves_while_the_first_drains(tmp_path: Path) -> None:
    async with two_started(tmp_path, "--mode", "stubborn") as child:
        await both_ready(tmp_path)
        child.process.send_signal(signal.SIGTERM)
        await child.logged("draining")
        assert (await get(tmp_path, "/health"))[0] == 503
        assert (await get(tmp_path, "/health", "second"))[0] == 200
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == EXIT_FAILED


async def test_the_limits_of_two_services_of_one_process_add_up(tmp_path: Path) -> None:
    limits = ("--drain-limit-s", "0.1")
    async with two_started(tmp_path, *limits, of_second=("--mode", "stubborn", "--drain-limit-s", "0.2")) as child:
        await both_ready(tmp_path)
        child.process.send_signal(signal.SIGTERM)
        assert await child.ended() == EXIT_FAILED
    assert "the frontend has drained" in child.log
    assert "not drained in 0.3 s" in child.log


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [
        ("crash", EXIT_FAILED, "ValueError: a bug"),
        ("model", EXIT_SETTINGS, "headrace-small: model.safetensors: torn\n"),
    ],
)
async def test_one_service_that_fails_ends_the_process(tmp_path: Path, mode: str, status: int, said: str) -> None:
    async with two_started(tmp_path, of_second=("--mode", mode)) as child:
        assert await child.ended() == status
    assert said in child.log


async def test_wrong_settings_of_one_service_are_refused_before_any_starts(tmp_path: Path) -> None:
    async with two_started(tmp_path, of_second=("--observe-log-level", "loud")) as child:
        assert await child.ended() == EXIT_SETTINGS
    assert child.log == "headrace-small: log_level: 'loud' is not one of debug, info, warning, error\n"
    assert not (tmp_path / "url").exists()


async def test_the_services_of_one_process_have_metrics_of_their_own_and_know_of_each_other(tmp_path: Path) -> None:
    async with two_started(tmp_path):
        await both_ready(tmp_path)
        for name, service in (("url", "frontend"), ("second", "router")):
            _, text = await get(tmp_path, "/metrics", name)
            assert set(re.findall(r'service="(\w+)"', text)) == {service}
            assert "headrace_small_starts_total" in text
        _, text = await get(tmp_path, "/sd")
    targets = {group["labels"]["service"]: group["targets"][0] for group in json.loads(text)}
    urls = {"frontend": (tmp_path / "url").read_text(), "router": (tmp_path / "second").read_text()}
    assert {service: f"http://{target}\n" for service, target in targets.items()} == urls
