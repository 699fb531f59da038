"""deploy/compose/healthcheck.py, run as a container runs it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "healthcheck.py"


class Service(BaseHTTPRequestHandler):
    """Ready at /ready/health only."""

    def do_GET(self) -> None:
        ready = self.path == "/ready/health"
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b'{"ready": true}' if ready else b'{"reasons": ["no worker"]}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the name is the base class's
        return


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Service)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


def check(where: str) -> tuple[int, str]:
    command = [sys.executable, "-I", "-S", str(SCRIPT), where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout


def test_a_ready_service_is_healthy(url: str, tmp_path: Path) -> None:
    file = tmp_path / "observe"
    file.write_text(f"{url}/ready\n")
    assert check(str(file))[0] == 0
    assert check(f"{url}/ready")[0] == 0


def test_a_service_that_is_not_ready_is_unhealthy_and_says_why(url: str) -> None:
    assert check(url) == (1, '{"reasons": ["no worker"]}\n')


def test_a_service_that_is_not_there_is_unhealthy(tmp_path: Path) -> None:
    assert check(str(tmp_path / "absent"))[0] == 1
    assert check("http://127.0.0.1:1")[0] == 1


def test_no_proxy_of_the_containers_environment_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert check(f"{url}/ready")[0] == 0
