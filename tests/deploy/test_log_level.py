"""`headrace log`: which processes are meant, and what they say, with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.operate import choose_processes
from shared import subjects
from shared.errors import ConfigError
from shared.messages.cards import INSTANCE, Instance, ServiceName
from shared.messages.codec import JSON_HEADER
from tests.integration.fleet import fleet
from tests.integration.stack import ROOT

NAMESPACE = "default"


def entries(*processes: tuple[ServiceName, str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for service, name in processes:
        instance = Instance(NAMESPACE, service, name, 1, "machine", 42, 1.0, "0.1.0")
        found[subjects.instance_key(NAMESPACE, service, name)] = INSTANCE.encode(instance, JSON_HEADER)
    return found


def chosen(values: dict[str, bytes], *prefixes: str) -> list[str]:
    return [one.instance for one in choose_processes(NAMESPACE, values, prefixes)]


def test_without_a_name_all_are_meant_and_a_name_may_be_a_beginning() -> None:
    values = entries(("worker", "0aa1"), ("router", "0ab2"), ("frontend", "1c")) | {"other": b"unreadable"}
    assert chosen(values) == ["1c", "0ab2", "0aa1"]
    assert chosen(values, "0aa", "1c", "0aa1") == ["1c", "0aa1"]
    with pytest.raises(ConfigError, match="several processes begin with '0a': 0aa1, 0ab2"):
        chosen(values, "0a")
    with pytest.raises(ConfigError, match="no process begins with 'f'"):
        chosen(values, "f")
    with pytest.raises(ConfigError, match="no process is registered"):
        chosen({})


def test_a_process_that_runs_logs_from_another_level_on(tmp_path: Path, nats_url: str) -> None:
    namespace, discovery = "loglevel", tmp_path / "discovery"
    where = ("--discovery-backend", "file", "--discovery-path", str(discovery), "--namespace", namespace)
    with fleet(tmp_path, nats_url, *where) as services:
        router = services.start("router", "router", "--observe-log-format", "json")
        services.wait_ready()

        def log(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "deploy.local.cli", "log", *words, "--nats", nats_url]
            command += ["--namespace", namespace, "--state", str(tmp_path / "state")]
            variables = {"HEADRACE_DISCOVERY_BACKEND": "file", "HEADRACE_DISCOVERY_PATH": str(discovery)}
            return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)

        told = log("debug", "--for-s", "3600")
        assert told.returncode == 0, told.stderr
        assert told.stdout.startswith("router ")
        assert told.stdout.endswith(" logs from level debug on for 3600 s\n")
        assert '"message":"logs from level debug on for 3600 s"' in router.log.read_text()
        for words, wrong in ((("loud",), "invalid choice"), (("info", "--for-s", "-1"), "--for-s is 0 to 86400")):
            told = log(*words)
            assert told.returncode == 2
            assert wrong in told.stderr
