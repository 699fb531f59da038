"""`headrace up --single`: the services are one process, which answers, heals, drains and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.integration.stack import ROOT, Up, eventually, running
from tests.process_tree import below, children
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
TOKENS = 300
READ_BEFORE = 20
"""Chunks until something happens; those that come after it are far more than is on its way."""
QUESTION = "How does water get from the river to the mill? " * 4
PACED = ("--engine", "simulated", "--simulated", "fixed_s=0.01")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("single") / "tiny", context_length=4096))


@contextlib.contextmanager
def single(state: Path, model: str, *flags: str) -> Iterator[Up]:
    state.mkdir()
    with running(state, "--single", "--model", model, *flags) as up:
        yield up


@pytest.fixture(scope="module")
def up(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with single(tmp_path_factory.mktemp("up") / "state", model, *PACED) as up:
        yield up


def ask(url: str, then: Callable[[], None] = lambda: None) -> str:
    """Return the text of a stream; `then` happens in the middle of it."""
    text, finish = "", None
    with OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number, chunk in enumerate(answer):
            if number == READ_BEFORE:
                then()
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    assert finish == "length"
    return text


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def engine(up: Up) -> int:
    """Return the id of the engine's process, which the one process has started."""

    def found() -> int | None:
        names = {pid: Path(f"/proc/{pid}/cmdline") for pid in children(up.pid("single"))}
        return next((pid for pid, name in names.items() if b"engine_main" in _read(name)), None)

    return eventually(found, limit_s=LIMIT_S, what="the engine runs")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has ended
        return b""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _read(Path(f"/proc/{pid}/cmdline"))]


def gone(pids: list[int]) -> None:
    eventually(lambda: not alive(pids), limit_s=LIMIT_S, what="all have ended")


def served(up: Up) -> bool:
    try:
        return json.loads(get(f"{up.url.removesuffix('/v1')}/health"))["ready"] is True
    except OSError:
        return False


def test_there_are_one_process_and_an_engine_and_no_server(up: Up) -> None:
    assert list(up.record["programs"]) == ["single"]
    assert (up.record["single"], up.record["nats"], up.record["etcd"], up.record["discovery"]) == (True, "", "", "")
    assert below(up.process.pid) == [up.pid("single"), engine(up)]
    assert not (up.state / "run" / "fleet.toml").exists()
    eventually(lambda: "stop:    Ctrl-C\n" in "".join(up.output), limit_s=LIMIT_S, what="all is said")
    assert "/ui\n" in "".join(up.output)
    assert "status:" not in "".join(up.output)


def test_an_answer_goes_on_when_the_engine_is_killed(up: Up) -> None:
    before = engine(up)
    text = ask(up.url)
    assert "from the river to the mill?" in text
    assert ask(up.url, lambda: os.kill(before, signal.SIGKILL)) == text
    assert engine(up) != before
    assert ask(up.url) == text


def test_each_service_has_metrics_of_its_own_and_the_page_shows_the_worker(up: Up) -> None:
    base = up.url.removesuffix("/v1")
    targets = {group["labels"]["service"]: group["targets"][0] for group in json.loads(get(f"{base}/sd"))}
    assert sorted(targets) == ["frontend", "router", "worker"]
    assert len(set(targets.values())) == 3
    for service, target in targets.items():
        text = get(f"http://{target}/metrics")
        assert f'service="{service}"' in text
        assert json.loads(get(f"http://{target}/health"))["ready"] is True
    assert "headrace_requests_total" in get(f"{base}/metrics")
    assert "<html" in get(f"{base}/ui")


def test_commands_that_cannot_reach_it_say_so_and_chat_answers(up: Up) -> None:
    def headrace(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy.local.cli", *words, "--state", str(up.state)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    for words in (["status"], ["explain"], ["sleep", "0a"]):
        refused = headrace(*words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("error: `up --single` runs here, ")
    assert "river" in headrace("chat", QUESTION).stdout


def test_a_stopped_one_answers_what_it_has_accepted_and_leaves_no_process(model: str, tmp_path: Path) -> None:
    with single(tmp_path / "state", model, *PACED) as up:
        processes = below(up.process.pid)
        assert len(processes) == 2
        assert ask(up.url, lambda: up.process.send_signal(signal.SIGTERM))
        assert up.process.wait(LIMIT_S) == 0, up.logs()
    gone(processes)
    log = (tmp_path / "state" / "logs" / "single.log").read_text()
    assert "Traceback" not in log


def test_when_the_process_dies_its_engine_does_and_both_come_back(model: str, tmp_path: Path) -> None:
    with single(tmp_path / "state", model, "--engine", "echo") as up:
        killed, before = up.pid("single"), engine(up)
        os.kill(killed, signal.SIGKILL)
        gone([before])
        eventually(lambda: up.pid("single") != killed and served(up), limit_s=LIMIT_S, what="it serves again")
        assert ask(up.url)


def test_when_up_is_killed_nothing_is_left(model: str, tmp_path: Path) -> None:
    with single(tmp_path / "state", model, "--engine", "echo") as up:
        processes = below(up.process.pid)
        up.process.kill()
        gone(processes)


def test_several_answers_at_once_and_a_real_model(model: str, tmp_path: Path) -> None:
    with single(tmp_path / "state", model) as up:
        texts: list[str] = []
        threads = [threading.Thread(target=lambda: texts.append(ask(up.url))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert len(texts) == 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--workers", "2"), "error: --workers 2: not with --single, "),
        (("--prefill", "1", "--decode", "1"), "error: --prefill: not with --single, "),
        (("--nats", "nats://127.0.0.1:1"), "error: --nats: not with --single, "),
        (("--set", "worker.nothing=1"), "error: worker.nothing: no such setting; "),
        (("--set", "frontend.limits.requests=-1"), "error: frontend.limits.requests: "),
        (("--model", "/no/such"), "error: --model /no/such: no such file or directory"),
    ],
)
def test_what_does_not_fit_is_one_line(model: str, tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-m", "deploy.local.cli", "up", "--single", "--engine", "echo", "--model", model]
    command += ["--state", str(tmp_path / "state"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = [line for line in done.stderr.splitlines() if "checking its settings" not in line]
    assert line.startswith(said)
