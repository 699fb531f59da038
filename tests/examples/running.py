"""Runs the examples as they stand, at free ports, with the programs of this checkout in front in PATH."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.integration.stack import ROOT, START_LIMIT_S, STOP_LIMIT_S, eventually
from tests.process_tree import below
from tests.servers import free_port

EXAMPLES = ROOT / "examples"
PORTS = ("4000", "5557", "5558", "5567", "5568", "8000", "8001", "8002", "8080", "9002")
"""Every port that an example names."""
ONE_EACH = "--frontends 1 --routers 1"
DO_LIMIT_S = 600.0


class Started:
    """A command that runs, with what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, said: str, times: int = 1, limit_s: float = START_LIMIT_S) -> None:
        """Wait until it has said this."""

        def has_said() -> bool:
            assert self.process.poll() is None, self.text
            return self.text.count(said) >= times

        eventually(has_said, limit_s=limit_s, what=f"{said!r}, {times} times")

    def end(self) -> None:
        """Press Ctrl-C, as on a terminal: the whole group gets it."""
        started = [self.process.pid, *below(self.process.pid)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        gone = [pid for pid in started if pid != self.process.pid]
        eventually(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone), limit_s=STOP_LIMIT_S, what="all have ended"
        )


class Examples:
    """Copies of all examples, with ports of their own and one model."""

    def __init__(self, folder: Path, model: Path) -> None:
        """`model` stands for ORG/NAME, and the last part of its path for NAME."""
        self.folder, self.state, self._programs = folder / "examples", folder / "state", folder / "programs"
        self.ports = {port: str(free_port()) for port in PORTS}
        self._model = model
        shutil.copytree(EXAMPLES, self.folder)
        for file in self.folder.rglob("*"):
            if file.is_file():
                file.write_text(self._replaced(file.read_text(encoding="utf-8")), encoding="utf-8")
        self._programs.mkdir()
        cli = f"PYTHONPATH={ROOT} exec {sys.executable} -P -m deploy.local.cli"
        state = f"--state {self.state}"
        port = f"--port {self.ports['8000']}"
        self.program(
            "headrace",
            f'case $1 in\nup | route) {cli} "$@" {state} {port} ;;\nexplain | status) {cli} "$@" {state} ;;\n'
            f'*) {cli} "$@" ;;\nesac',
        )
        self.program("python3", f'exec {sys.executable} "$@"')

    def _replaced(self, text: str) -> str:
        text = re.sub(r"\b\d{4}\b", lambda match: self.ports.get(match[0], match[0]), text)
        return re.sub(r"\bNAME\b", self._model.name, text.replace("ORG/NAME", str(self._model)))

    def program(self, name: str, script: str) -> None:
        """Put a program into PATH."""
        file = self._programs / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def commands(self, example: str) -> list[str]:
        """Return the commands that the README of an example shows, with the ports of the copy."""
        text = (self.folder / example / "README.md").read_text(encoding="utf-8")
        blocks = "\n".join(re.findall(r"^```console\n(.*?)^```", text, re.M | re.S))
        return [command.replace("\\\n", " ") for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", blocks, re.M)]

    def url(self, port: str) -> str:
        """Return the base URL at a port that the examples name."""
        return f"http://127.0.0.1:{self.ports[port]}"

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OPENAI_"))}
        path = f"{self._programs}:{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        return kept | {"PATH": path, "HEADRACE_CACHE": str(self.state / "models"), **more}

    @contextlib.contextmanager
    def running(self, example: str, command: str, **variables: str) -> Iterator[Started]:
        """Run a command in an example's directory until the block ends."""
        process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=self.folder / example,
            env=self._environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        started = Started(process)
        try:
            yield started
        finally:
            started.end()

    def do(self, example: str, command: str, **variables: str) -> str:
        """Run a command in an example's directory to its end, and return what it prints."""
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder / example,
            env=self._environment(variables),
            capture_output=True,
            text=True,
            timeout=DO_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout
