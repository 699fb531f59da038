"""deploy/local/size/started_up.py: what is shown of an `up` that a measurement starts."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.local.size.started_up import LOST_LIMIT, ONE_WORKER, UpOutput, _stop, command, running_up
from deploy.local.terminal import Terminal
from shared.errors import Unavailable
from shared.installation import TREE
from tests.integration.stack import eventually
from tests.process_tree import below
from tests.processes import has_ended
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

LIMIT_S = 120.0
FLAGS = (*ONE_WORKER, "--engine", "simulated", "--discovery", "file")


def test_an_up_is_quiet_but_for_what_happens_while_it_serves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = ""

    def shown(text: str) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return text in said

    model = str(write_tiny_model(tmp_path / "tiny"))
    with running_up((*FLAGS, "--model", model), Terminal(), "a test") as (url, home):
        record = json.loads((home / "run" / "up.json").read_text(encoding="utf-8"))
        os.kill(record["programs"]["worker-0"]["pid"], signal.SIGKILL)
        eventually(lambda: shown("worker-0 ended (SIGKILL)"), limit_s=LIMIT_S, what="it is shown")
        eventually(lambda: shown("and is ready\n"), limit_s=LIMIT_S, what="it is shown")
    said += capfd.readouterr().err
    assert f"started for a test: {url}\n" in said
    for word in ("ask:", "logs:", "stop:", "stopping", "Ctrl-C", "draining"):
        assert word not in said


def test_an_up_that_does_not_start_shows_what_it_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    with (
        pytest.raises(Unavailable, match="the `up` for a test did not start, status 2: the lines above say why"),
        running_up((*FLAGS, "--model", model, "--set", "worker.no_such=1"), Terminal(), "a test"),
    ):
        raise AssertionError("it has started")
    assert "error: worker.no_such: no such setting" in capfd.readouterr().err


def test_an_up_of_many_workers_of_which_each_is_lost_once_is_not_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"worker-{number} ended (status 1); starting another in 0.25 s" for number in range(LOST_LIMIT)]
    script = f"import sys\nfor line in {lines!r}: print(line, file=sys.stderr, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    given_up: list[bool] = []
    output = UpOutput(process.stderr, Terminal(), lambda: given_up.append(True))
    assert process.wait(LIMIT_S) == 0
    output.close(failed=True)
    assert not given_up
    assert capfd.readouterr().err.count("ended (") == LOST_LIMIT


@pytest.mark.parametrize("lost", [2, 3, 4])
def test_an_up_whose_engine_is_lost_again_and_again_is_given_up(lost: int, capfd: pytest.CaptureFixture[str]) -> None:
    said = "worker-0: the engine is lost (it was killed by signal 9); starting another in 0.25 s"
    lines = ["worker-0: loading weights: 10 %", *[said] * lost, "ended"]
    script = (
        f"import sys, time\nfor line in {lines!r}: print(line, file=sys.stderr, flush=True)\ntime.sleep({lost} * 60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    output = UpOutput(process.stderr, Terminal(), process.terminate)
    if lost < LOST_LIMIT:
        shown = io.StringIO()
        eventually(
            lambda: shown.write(capfd.readouterr().err) is not None and shown.getvalue().count(said) == lost,
            limit_s=LIMIT_S,
            what="it is shown",
        )
        assert process.poll() is None, "it may still start"
        process.kill()
    assert process.wait(LIMIT_S) == (-signal.SIGTERM if lost >= LOST_LIMIT else -signal.SIGKILL)
    output.close(failed=True)


def test_an_up_of_a_background_job_is_stopped_while_it_fetches_a_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as hub:
        hub.settimeout(LIMIT_S)
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "PYTHONPATH": str(TREE)}
        process = subprocess.Popen(
            command("up", "--state", str(tmp_path), *FLAGS, "--model", "org/name"),
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
        )
        with hub.accept()[0]:
            _stop(process)
    assert process.returncode == -signal.SIGTERM


def _take(interrupts: Any) -> None:
    """Take SIGINT so, and SIGHUP as usual, also if the tests themselves run under nohup."""
    signal.signal(signal.SIGINT, interrupts)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "interrupts", "status"),
    [
        (signal.SIGTERM, signal.default_int_handler, 130),
        (signal.SIGHUP, signal.SIG_IGN, 130),  # a shell's background job
        (signal.SIGKILL, signal.default_int_handler, -signal.SIGKILL),
    ],
)
def test_a_measurement_that_is_ended_leaves_none_of_the_processes_that_it_has_started(
    number: signal.Signals, interrupts: Any, status: int, tmp_path: Path
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    words = ("--longest", "512", "--most", "1", "--out", str(tmp_path / "p.json"))
    up = ("--engine", "simulated", "--simulated", "fixed_s=0.1", "--discovery", "file", "--model", model)
    measuring = subprocess.Popen(
        command("profile", *words, "--", *up),
        env={**os.environ, "PYTHONPATH": str(TREE), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(_take, interrupts),
    )
    assert measuring.stderr is not None
    with measuring.stderr:
        while "started for this profile" not in (line := measuring.stderr.readline()):
            assert line, "it has ended"
        eventually((tmp_path / "p.json").exists, limit_s=LIMIT_S, what="a point is measured")
        started = below(measuring.pid)
        assert len(started) > 3
        measuring.send_signal(number)
        said = measuring.communicate(timeout=LIMIT_S)[1]  # until the last of them has closed it
    assert measuring.returncode == status
    eventually(lambda: all(map(has_ended, started)), limit_s=LIMIT_S, what="all have ended")
    if number != signal.SIGKILL:
        assert "the same command goes on with it" in said
        assert not list(tmp_path.glob("headrace-up-*"))
