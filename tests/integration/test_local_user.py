"""`headrace up`, and another user of the same machine: it reaches the API and clients' subjects, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import ROOT, Up, running
from tests.tiny_model import write_tiny_model

STRANGER = 65534
LIMIT_S = 180.0

PROGRAM = """
import asyncio, json, os, socket, sys, urllib.error, urllib.request
import nats

uid, url, state, api, worker = int(sys.argv[1]), *sys.argv[2:]
os.setgroups([])
os.setgid(uid)
os.setuid(uid)


async def main():
    denied = asyncio.Queue()

    async def note(wrong):
        denied.put_nowait(str(wrong))

    async def refused(what):
        async with asyncio.timeout(60):
            assert "permissions violation" in (await denied.get()).lower(), what

    client = await nats.connect(url, error_cb=note)
    for subject in (">", "headrace.>", "_INBOX_services.>"):
        await client.subscribe(subject)
        await refused(subject)
    for operation in ("generate", "cancel", "load"):
        await client.publish(f"headrace.default.worker.{worker}.{operation}", b"")
        await refused(operation)
    models = json.loads((await client.request("headrace.default.frontend.models", b"", timeout=60)).data)
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
    answer = json.loads((await client.request("headrace.default.frontend.completions", body, timeout=60)).data)
    await client.close()
    files = {}
    for name in ("up.json", "fleet.toml", "nats.conf", "worker-0.toml"):
        try:
            files[name] = len(open(f"{state}/run/{name}").read())
        except OSError as wrong:
            files[name] = wrong.strerror
    try:
        socket.socket(socket.AF_UNIX).connect(f"{state}/run/etcd:0")
        etcd = "connected"
    except OSError as wrong:
        etcd = wrong.strerror
    print(json.dumps({"models": models, "answer": answer, "files": files, "etcd": etcd}))


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)  # so that the run directory alone protects what is in it
        state = place / "state"
        state.mkdir(mode=0o755)
        model = write_tiny_model(place / "tiny")
        (place / "keys.toml").write_text(f'alice = {{ sha256 = "{"0" * 64}" }}\n')
        flags = ("--engine", "echo", "--workers", "1", "--model", str(model), "--keys", str(place / "keys.toml"))
        with running(state, *flags) as stack:
            yield stack


@pytest.fixture(scope="module")
def seen(up: Up) -> dict[str, Any]:
    """What the stranger has seen, all of whose attempts at what is the services' were refused."""
    worker = json.loads(command("status", "--json", "--state", str(up.state)))["instances"]
    (instance,) = (each["instance"] for each in worker if each["service"] == "worker")
    arguments = (str(STRANGER), up.record["nats"], str(up.state), up.url, instance)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def command(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "deploy.local.cli", *words],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    ).stdout


def test_a_client_without_a_name_is_asked_for_a_key(seen: dict[str, Any]) -> None:
    for part in ("models", "answer"):
        assert "API key" in seen[part]["error"]["message"]


def test_no_file_of_the_run_directory_can_be_read(seen: dict[str, Any]) -> None:
    assert set(seen["files"].values()) == {"Permission denied"}


def test_etcd_cannot_be_reached(up: Up, seen: dict[str, Any]) -> None:
    assert seen["etcd"] == "Permission denied"
    assert ports(up.pid("etcd")) == set(), "it listens at no port"


def ports(pid: int) -> set[int]:
    """TCP ports where a process listens."""
    inodes = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    mine = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]
    return {int(line[1].rpartition(":")[2], 16) for line in mine}


def test_a_worker_listens_at_no_port_but_that_of_its_metrics(up: Up) -> None:
    observe = up.record["programs"]["worker-0"]["observe"]
    assert ports(up.pid("worker-0")) == {int(observe.rpartition(":")[2])}


def test_no_command_line_shows_the_password_of_nats(up: Up) -> None:
    password = up.nats["password"]
    assert len(password) >= 32
    for program in up.record["programs"]:
        shown = Path(f"/proc/{up.pid(program)}/cmdline").read_bytes()
        assert password.encode() not in shown
