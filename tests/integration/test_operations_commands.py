"""The shell functions of docs/operations.md restart the processes of an `up`, and requests are answered meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.stack import ROOT, Up, running, with_models

pytestmark = pytest.mark.timeout(1200)

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
[FUNCTIONS] = re.findall(r"^```\n(of\(\) \{.*?)^```", PAGE, re.M | re.S)
LIMIT_S = 180.0


def ask(url: str) -> int:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body), timeout=LIMIT_S) as answer:
        return int(answer.status)


def restart(up: Up, *programs: str) -> list[str]:
    """Run the page's function for each, and return what it printed."""
    functions = FUNCTIONS.replace(".headrace/run/up.json", str(up.state / "run" / "up.json"))
    calls = " && ".join(f"restart {program}" for program in programs)
    done = subprocess.run(
        ["sh", "-c", f"{functions}\n{calls}"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr + up.logs()
    return done.stdout.splitlines()


def test_workers_are_restarted_one_after_the_other_without_losing_a_request(tmp_path: Path) -> None:
    with running(with_models(tmp_path), "--workers", "2", "--engine", "echo") as up:
        before = {name: up.pid(name) for name in ("worker-0", "worker-1", "router", "frontend")}
        statuses: list[int] = []
        ended = threading.Event()

        def keep_asking() -> None:
            while not ended.is_set():
                statuses.append(ask(up.url))

        with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ending:
            asking = pool.submit(keep_asking)
            ending.callback(ended.set)
            said = restart(up, "worker-0", "worker-1")
        asking.result()
        assert said == ["worker-0 is ready", "worker-1 is ready"]
        assert {name for name, pid in before.items() if up.pid(name) != pid} == {"worker-0", "worker-1"}
        assert set(statuses) == {200}
        assert restart(up, "router", "frontend") == ["router is ready", "frontend is ready"]
        assert {name for name, pid in before.items() if up.pid(name) != pid} == set(before)
        assert ask(up.url) == 200
