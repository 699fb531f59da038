"""deploy/compose/nats_metrics.py at a real NATS server."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.stack import ROOT, eventually
from tests.servers import free_port, nats_server

PROGRAM = ROOT / "deploy" / "compose" / "nats_metrics.py"
LIMIT_S = 60.0


@contextmanager
def exporter(server: str) -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-I", str(PROGRAM), server, f"127.0.0.1:{port}"])
    try:
        eventually(lambda: shown(port), limit_s=LIMIT_S, what="it answers")
        yield port
    finally:
        process.kill()
        process.wait()


def shown(port: int) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")}


def test_the_counts_of_a_server_and_its_absence(tmp_path: Path) -> None:
    monitor = free_port()
    with exporter(f"http://127.0.0.1:{monitor}") as port:
        assert shown(port) == {"gnatsd_up": 0.0}, "without the server nothing is said of it"
        with nats_server(tmp_path, f"http: 127.0.0.1:{monitor}\n"):
            found = shown(port)
            assert found["gnatsd_up"] == 1
            assert found["gnatsd_varz_mem"] > 1 << 20
            assert found["gnatsd_varz_slow_consumers"] == 0
            assert len(found) == 9
        assert shown(port)["gnatsd_up"] == 0


@pytest.mark.parametrize("arguments", [["file:///etc/passwd", "127.0.0.1:1"], ["http://x", "127.0.0.1"], []])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    told = subprocess.run([sys.executable, "-I", str(PROGRAM), *arguments], capture_output=True, text=True, timeout=60)
    assert told.returncode == 2
    assert "usage:" in told.stderr
