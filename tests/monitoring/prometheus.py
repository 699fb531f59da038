"""A real Prometheus with the repository's alerts, whose times can be shortened."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.integration.stack import ROOT, eventually
from tests.servers import free_port

PATHS = "/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin"
PROMETHEUS = shutil.which("prometheus", path=PATHS)
PROMTOOL = shutil.which("promtool", path=PATHS)
ALERTS = ROOT / "deploy" / "monitoring" / "alerts.yml"
START_LIMIT_S = 120.0
SCRAPE_S = 1
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def quickened(rules: str, times: int, least_s: int = 6) -> str:
    """The rules with all their times divided, but to `least_s` at least: a rate needs some scrapes."""

    def window(found: re.Match[str]) -> str:
        return f"{found[1]}{max(least_s, int(found[2]) * _SECONDS[found[3]] // times)}s"

    def wait(found: re.Match[str]) -> str:
        return f"{found[1]}{max(least_s, int(found[2]) * _SECONDS[found[3]] // times)}s"

    return re.sub(r"(for: )(\d+)([smh])", wait, re.sub(r"(\[|offset )(\d+)([smh])", window, rules))


def shown(expr: str) -> str:
    """The query as Grafana sends it, where all is chosen."""
    for name, value in (("$namespace", ".*"), ("$model", ".*"), ("$__rate_interval", "10s")):
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


class Prometheus:
    """A running one."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = log

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def series(self, expr: str) -> list[dict[str, Any]]:
        """The series that a query returns now, without those that are not numbers."""
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return [one for one in found if one["value"][1] not in ("NaN", "+Inf", "-Inf")]

    def firing(self) -> list[dict[str, str]]:
        """The labels of the alerts that fire, `alertname` among them."""
        return [one["labels"] for one in self.ask("alerts")["alerts"] if one["state"] == "firing"]

    def fired(self, within_s: float) -> list[dict[str, str]]:
        """The labels of the alerts that fired within the last seconds, also if they have ended since."""
        expr = f'max_over_time(ALERTS{{alertstate="firing"}}[{int(within_s)}s])'
        return [one["metric"] for one in self.series(expr)] if within_s >= 1 else []

    def healthy(self) -> set[str]:
        """The addresses of the targets that answered last time."""
        return {one["labels"]["instance"] for one in self.ask("targets")["activeTargets"] if one["health"] == "up"}


@contextmanager
def prometheus(folder: Path, jobs: list[dict[str, Any]], rules: str) -> Iterator[Prometheus]:
    """Scrapes each SCRAPE_S."""
    assert PROMETHEUS is not None
    folder.mkdir()
    (folder / "alerts.yml").write_text(rules)
    settings = {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S}s"),
        "rule_files": ["alerts.yml"],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    port, log = free_port(), folder / "log"
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=out, stderr=out)
    try:
        one = Prometheus(port, process, log)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return bool(one.ask("query", query="vector(1)"))
            except OSError:
                return False

        eventually(answers, limit_s=START_LIMIT_S, what="Prometheus answers")
        yield one
    finally:
        process.kill()
        process.wait()
