"""`headrace autoscale` on a real `up` with the simulated engine: workers come and go under load."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from deploy.local import probe
from deploy.local.autoscale.launchers import scale_up
from tests.deploy.size.test_plan import write_profile
from tests.integration.stack import ROOT, Up, eventually, running
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
STEP_S = 0.02
TOKENS = 40
SUBJECT = {"model": "tiny", "server": "", "machine": "", "versions": {}, "longest": 512, "most": 4}
TIMES: dict[str, Any] = {
    "subject": SUBJECT,
    "prefill": [(16, 0, STEP_S), (512, 0, 0.04)],
    "decode": [(1, 0, STEP_S), (4, 0, STEP_S), (1, 512, STEP_S), (4, 512, STEP_S)],
}
"""A worker that has four requests at once, and answers about four a second."""
ENGINE = ("--engine", "simulated", "--simulated", f"fixed_s={STEP_S}", "--set", "worker.max_running=4")


@contextlib.contextmanager
def autoscaled(up: Up, *flags: str, log: str = "autoscale.log") -> Iterator[Callable[[], str]]:
    """`headrace autoscale` while the context is open, and what it has printed so far."""
    profile, file = write_profile(up.state, **TIMES), up.state / log
    words = ["autoscale", "--state", str(up.state), "--profile", str(profile), "--every", "0.5", "--start-s", "4"]
    with file.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.local.cli", *words, "--cool-down", "8", "--itl", "0.1", *flags],
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
    try:
        yield file.read_text
        assert process.poll() is None, file.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(LIMIT_S)
        print(file.read_text())
    assert status == 0


@contextlib.contextmanager
def worker_of_another_model(up: Up) -> Iterator[None]:
    """A worker that joins the fleet while the context is open."""
    file, model = up.state / "run" / f"{workers(up)[0]}.toml", write_tiny_model(up.state / "other")
    other = ("--model", str(model), "--model-name", "other", "--observe-port", "0")
    words = ["-m", "services.worker", "--config", str(file), *other]
    with (up.state / "other.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def workers(up: Up) -> list[str]:
    return sorted(name for name in up.record["programs"] if name.split("-")[0] in ("worker", "prefill", "decode"))


class Load:
    """Requests at a steady rate, each of which must be answered whole."""

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S)
        self.per_s = 1.0
        self.answered = 0
        self.failed: list[str] = []

    async def run(self) -> None:
        """Ask until the rate is 0, and wait for all answers."""
        async with self._client, asyncio.TaskGroup() as tasks:
            number = 0
            while self.per_s:
                tasks.create_task(self._ask(number))
                number += 1
                await asyncio.sleep(1 / self.per_s)

    async def once(self) -> bool:
        """Ask once; return whether that was answered."""
        async with self._client:
            await self._ask(0)
        return not self.failed

    async def _ask(self, number: int) -> None:
        try:
            answer = await self._client.completions.create(
                model="tiny", prompt=f"question {number}", max_tokens=TOKENS, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            if answer.usage.completion_tokens != TOKENS:
                self.failed.append(f"{answer.usage.completion_tokens} tokens")
            self.answered += 1
        except Exception as wrong:  # noqa: BLE001 whatever it is, the request was lost
            self.failed.append(repr(wrong))


async def reached(up: Up, number: int) -> None:
    await asyncio.to_thread(
        eventually, lambda: len(workers(up)) == number, limit_s=LIMIT_S, what=f"{number} workers of {workers(up)}"
    )


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("autoscale")
    model = str(write_tiny_model(state / "tiny"))
    with running(state, *ENGINE, "--workers", "1", "--model", model, "--discovery", "file") as stack:
        yield stack


async def test_a_fleet_grows_to_three_under_load_and_shrinks_to_one_and_no_request_is_lost(up: Up) -> None:
    load = Load(up.url)
    port = free_port()
    with autoscaled(up, "--max", "3", "--metrics", f"127.0.0.1:{port}") as said:
        asking = asyncio.create_task(load.run())
        load.per_s = 9.0
        await reached(up, 3)
        load.per_s = 1.0
        await reached(up, 1)
        load.per_s = 0.0
        await asking
        status, metrics = await probe.get(f"http://127.0.0.1:{port}/metrics", timeout_s=5.0)
        assert status == 200
        assert b'headrace_desired_workers{role="aggregated"} 1.0' in metrics
    assert load.failed == []
    assert load.answered > 20
    assert "1 aggregated -> " in said()


async def test_a_fleet_without_requests_goes_to_zero_and_the_first_refused_request_brings_a_worker(up: Up) -> None:
    with autoscaled(up, "--min", "0", "--max", "2"):
        await reached(up, 0)
        load = Load(up.url)
        asking = asyncio.create_task(load.run())
        await reached(up, 1)
        load.per_s = 0.0
        await asking
        assert load.failed or load.answered, "some are refused until a worker is there"
        async with asyncio.timeout(LIMIT_S):
            while not await Load(up.url).once():  # noqa: ASYNC110 a router may not know the new worker yet
                await asyncio.sleep(0.1)


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(up: Up) -> None:
    before = workers(up)
    with autoscaled(up, "--min", "2", "--dry-run") as said:
        await asyncio.to_thread(eventually, lambda: "-> 2 aggregated" in said(), limit_s=LIMIT_S, what="it says so")
        await asyncio.sleep(1)
    assert workers(up) == before


async def test_a_dry_run_with_nothing_to_do_says_what_it_sees_at_once_and_at_each_change(up: Up) -> None:
    there = f"{len(workers(up))} aggregated"
    with autoscaled(up, "--min", there[0], "--max", there[0], "--dry-run") as said:
        idle = (
            f"{there} there, all serve; {there} wanted: 0 requests/s expected, 0 to catch up with, 0 aggregated needed"
        )
        await asyncio.to_thread(eventually, lambda: idle in said(), limit_s=LIMIT_S, what="it says what it sees")
        assert await Load(up.url).once()
        await asyncio.to_thread(eventually, lambda: "1 aggregated needed" in said(), limit_s=LIMIT_S, what="a change")
        lines = [line.split(": ")[0][10:] + line.split(", ")[-1] for line in said().splitlines()]
    assert all(line != after for line, after in pairwise(lines)), "what has not changed is not said again"


async def test_a_launcher_that_refuses_is_asked_again_later_and_not_at_every_look(up: Up) -> None:
    before, socket = workers(up), up.state / "run" / "scale.sock"
    hidden = socket.rename(socket.with_name("hidden.sock"))
    try:
        with autoscaled(up, "--min", str(len(before) + 1)) as said:
            await asyncio.to_thread(eventually, lambda: "refused: " in said(), limit_s=LIMIT_S, what="it says so")
            await asyncio.sleep(3)
    finally:
        hidden.rename(socket)
    assert said().count("refused: `up` does not answer") == 1
    assert "the next try is in 10 s" in said()
    assert workers(up) == before


def test_a_profile_of_another_model_is_refused(up: Up) -> None:
    profile = write_profile(up.state, subject={**SUBJECT, "model": "other"})
    words = ["autoscale", "--state", str(up.state), "--profile", str(profile)]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.local.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert "is a profile of other, and the fleet serves tiny" in done.stderr


async def test_a_fleet_is_left_alone_while_another_model_has_workers_in_it(up: Up) -> None:
    there, paused = workers(up), "nothing changes: the fleet serves several models, and its load is not counted apart: "
    with autoscaled(up, "--min", f"{len(there)}", "--max", f"{len(there)}") as said:
        await asyncio.to_thread(eventually, lambda: "all serve" in said(), limit_s=LIMIT_S, what="the first look")
        with worker_of_another_model(up):
            await asyncio.to_thread(
                eventually, lambda: f"{paused}other, tiny" in said(), limit_s=LIMIT_S, what="it says so"
            )
        assert await Load(up.url).once()
        await asyncio.to_thread(
            eventually, lambda: "1 aggregated needed" in said(), limit_s=LIMIT_S, what="it scales again"
        )
    assert workers(up) == there


def test_what_up_is_asked_for_and_cannot_do_is_refused_with_the_reason(up: Up) -> None:
    socket = up.state / "run" / "scale.sock"
    assert "the workers of this `up` are aggregated" in asyncio.run(scale_up(socket, {"prefill": 1}, []))
    assert "not a question" in asyncio.run(scale_up(socket, {"aggregated": 65}, []))
    assert "does not answer" in asyncio.run(scale_up(Path("/nowhere/scale.sock"), {"aggregated": 1}, []))


async def test_both_roles_of_a_split_fleet_go_to_zero_and_come_back(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    flags = (*ENGINE, "--prefill", "2", "--decode", "1", "--kvbm-bytes", "64M", "--model", model, "--discovery", "file")
    with running(tmp_path, *flags) as split, autoscaled(split, "--min", "0", "--max", "prefill=2,decode=2") as said:
        await reached(split, 0)
        load = Load(split.url)
        asking = asyncio.create_task(load.run())
        await reached(split, 2)
        assert workers(split) == ["decode-0", "prefill-0"]
        load.per_s = 0.0
        await asking
        async with asyncio.timeout(LIMIT_S):
            while not await Load(split.url).once():  # noqa: ASYNC110 a router may not know the new workers yet
                await asyncio.sleep(0.1)
    assert "0 prefill, 0 decode -> 1 prefill, 1 decode" in said()


async def test_a_second_one_of_the_fleet_watches_and_takes_over_when_the_first_has_ended(up: Up) -> None:
    more = len(workers(up)) + 1
    with contextlib.ExitStack() as first:
        first.enter_context(autoscaled(up, "--min", f"{more}", "--max", f"{more}", log="first.log"))
        await reached(up, more)
        with autoscaled(up, "--max", "1") as said:
            await asyncio.to_thread(
                eventually, lambda: "scales this fleet already" in said(), limit_s=LIMIT_S, what="it says so"
            )
            assert len(workers(up)) == more
            first.close()
            await reached(up, 1)
