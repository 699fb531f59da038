"""The program that shows a worker's GPUs, as a process that a test asks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.stack import ROOT, eventually

LIMIT_S = 60.0
Series = dict[tuple[str, ...], float]


class Telemetry:
    """The program that shows the metrics."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def text(self, command: str = "show") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        lines = []
        while line := self.process.stdout.readline().strip():
            lines.append(line)
        return "\n".join(lines) + "\n"

    def series(self) -> Series:
        """Name, number, UUID and any other label → value."""
        found: Series = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                labels = dict(sample.labels)
                found[sample.name, labels.pop("gpu"), labels.pop("uuid"), *labels.values()] = sample.value
        return found

    def until(self, met: Callable[[Series], bool]) -> Series:
        found: Series = {}

        def look() -> bool:
            nonlocal found
            found = self.series()
            return met(found)

        eventually(look, limit_s=LIMIT_S, what=f"the metrics show it; now {found}")
        return found

    @property
    def log(self) -> list[str]:
        return self._log.read_text().splitlines()


@contextmanager
def telemetry(
    environment: Mapping[str, str], folder: Path, *gpus: str, limit_s: float = LIMIT_S
) -> Iterator[Telemetry]:
    """With more in its environment."""
    log = folder / "log"
    command = [sys.executable, "-m", "tests.nvml.metrics_program", str(limit_s), *gpus]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Telemetry(process, log)
        finally:
            process.kill()
