"""deploy/local/unit.py: systemd takes the units, and what they start is the service."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.local import cli
from deploy.local.stack.stack import ServiceName
from deploy.local.unit import WRITTEN, unit
from services.frontend.__main__ import drain_limit_s as of_frontend
from services.frontend.config import FrontendConfig
from services.kvbm.__main__ import DRAIN_LIMIT_S as KVBM_S
from services.router.__main__ import DRAIN_LIMIT_S as ROUTER_S
from services.worker.__main__ import drain_limit_s as of_worker
from services.worker.config import WorkerConfig
from shared.config import load
from shared.installation import service_program

LIMIT_S = 120.0
ANALYZE = shutil.which("systemd-analyze")
FULL: dict[ServiceName, list[str]] = {
    "frontend": ["limits.drain_s=60", "http.drain_delay_s=7.5"],
    "router": ["discovery.path=/srv/found", "observe.events=/srv/events"],
    "worker": ["model=/srv/a model", "cache=/srv/a cache%n", "kvbm.pool=/dev/shm/pool", "drain_s=90"],
    "kvbm": ["pool.directory=/dev/shm/pool", "pool.size_bytes=1048576", "disk.directory=/srv/disk"],
}


def lines(text: str) -> dict[str, list[str]]:
    """Return the values of a unit by name. A line without `=` would be a fault."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            name, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(name, []).append(value)
    return found


def command(text: str) -> list[str]:
    """Return what ExecStart runs, as systemd reads it."""
    [written] = lines(text)["ExecStart"]
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(written)]


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here (Debian's package systemd)")
@pytest.mark.parametrize("of_user", [False, True], ids=["system", "user"])
@pytest.mark.parametrize("service", FULL)
def test_systemd_takes_every_line(service: ServiceName, of_user: bool, tmp_path: Path) -> None:
    file = tmp_path / f"headrace-{service}.service"
    file.write_text(unit(service, FULL[service], of_user=of_user), encoding="utf-8")
    assert ANALYZE is not None
    words = [ANALYZE, "verify", "--man=no", *(["--user"] if of_user else []), str(file)]
    variables = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    checked = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=variables)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_what_is_started_is_the_service_and_sigterm_ends_it(tmp_path: Path) -> None:
    url_file = tmp_path / "a url $HOME 100%"
    text = unit("router", [f"observe.url_file={url_file}", "nats.url=nats://127.0.0.1:1"], of_user=False)
    started = command(text)
    assert started[: len(service_program("router"))] == list(service_program("router"))
    service = subprocess.Popen(started, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + LIMIT_S
        while (
            not (url_file.exists() and url_file.read_text()) and service.poll() is None and time.monotonic() < until_s
        ):
            time.sleep(0.02)
        with urllib.request.urlopen(f"{url_file.read_text().strip()}/live", timeout=LIMIT_S) as answer:
            assert answer.status == 200
        service.send_signal(signal.SIGTERM)
        assert service.wait(LIMIT_S) == 0
    finally:
        service.kill()
        service.wait()


@pytest.mark.parametrize(
    ("service", "words", "content"),
    [
        ("frontend", [], ""),
        ("frontend", FULL["frontend"], "[limits]\ndrain_s = 10\n"),
        ("frontend", ["http.drain_delay_s=5"], "[limits]\ndrain_s = 300\n"),
        ("router", [], ""),
        ("worker", ["model=/srv/model"], ""),
        ("worker", ["model=/srv/model"], "drain_s = 100\n"),
        ("worker", FULL["worker"], ""),
        ("kvbm", FULL["kvbm"], ""),
    ],
)
def test_systemd_waits_longer_than_the_service_drains(
    service: ServiceName, words: list[str], content: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    text = unit(service, [*words, f"config={file}"], of_user=False)
    flags = command(text)[len(service_program(service)) :]
    limits: dict[str, Callable[[], float]] = {
        "frontend": lambda: of_frontend(load(FrontendConfig, environ={}, flags=flags)),
        "worker": lambda: of_worker(load(WorkerConfig, environ={}, flags=flags)),
        "router": lambda: ROUTER_S,
        "kvbm": lambda: KVBM_S,
    }
    assert float(lines(text)["TimeoutStopSec"][0]) >= limits[service]() + 5
    assert lines(text)["KillMode"] == ["mixed"]  # the engine is ended by its worker


def test_a_service_may_write_where_its_settings_say_and_has_what_its_memory_needs() -> None:
    written: list[str] = []
    for service, words in FULL.items():
        found: dict[str, Any] = lines(unit(service, words, of_user=False))
        written += found.get("ReadWritePaths", [])
        assert found["User"] == ["headrace"]
        assert ("LimitMEMLOCK" in found) == (service in ("worker", "kvbm"))
        assert ("PrivateDevices" in found) == (service in ("frontend", "router"))
    assert len(written) == len(WRITTEN)
    assert '"-/srv/a cache%%n"' in written
    assert "-/srv/disk" in written


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["router", "policy"], "error: unit: policy: not NAME=VALUE, such as limits.requests=64"),
        (["router", "policy=a\nExecStart=b"], "error: unit: policy: 'a\\nExecStart=b' has characters that no unit can"),
        (
            ["router", "nothing=1"],
            "error: router.nothing: no such setting; `.venv/bin/python -m services.router --help",
        ),
        (["frontend", "limits.requests=x"], "error: frontend.limits.requests: Expected `int`"),
        (["frontend", "nats.password=p"], "error: frontend.nats-password: set a secret in the file or the environment"),
        (["worker"], "error: worker: Object missing required field `model`"),
        (["kvbm", "config=/no/such.toml"], "error: /no/such.toml: No such file or directory"),
    ],
)
def test_a_wrong_setting_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["unit", *words]) == 2
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert line.startswith(said)
    assert shown.out == ""


def test_the_flag_for_the_users_own_systemd_leaves_out_what_that_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["unit", "router", "policy=random", "--user"]) == 0
    found = lines(capsys.readouterr().out)
    assert found["WantedBy"] == ["default.target"]
    assert not {"User", "ProtectSystem", "LimitMEMLOCK"} & found.keys()
    assert found["NoNewPrivileges"] == ["yes"]
