"""The boards: the files are those of the program, and ask only for metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.monitoring.boards import BOARDS, DIRECTORY
from deploy.monitoring.grafana import Board, render
from tests.metric_names import every_metric
from tests.monitoring.prometheus import ALERTS, PROMTOOL, shown

METRIC = re.compile(r"headrace_\w+")
SERIES = re.compile(r"_(bucket|sum|count)$")
"""What the series of a histogram have after its name."""


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_file_of_a_board_is_what_the_program_writes(board: Board) -> None:
    text = (DIRECTORY / f"{board.uid.removeprefix('headrace-')}.json").read_text()
    assert text == render(board), "run `python -m deploy.monitoring.boards`"
    read = Dashboard.from_json(json.loads(text))
    assert json.loads(JSONEncoder().encode(read)) == json.loads(text), "Grafana's schema has all that is written"


def test_there_are_no_other_files() -> None:
    assert len(list(DIRECTORY.iterdir())) == len(BOARDS)


def test_every_panel_says_what_it_means_and_is_there_once() -> None:
    titles = [(board.uid, panel.title) for board in BOARDS for panel in board.panels]
    assert len(set(titles)) == len(titles)
    assert all(panel.meaning.endswith(".") and panel.queries for board in BOARDS for panel in board.panels)


async def test_boards_and_alerts_ask_for_metrics_that_exist() -> None:
    queries = [query.expr for board in BOARDS for panel in board.panels for query in panel.queries]
    text = " ".join(queries) + ALERTS.read_text()
    known = set(await every_metric())
    assert unknown(text, known) == set()
    assert len(set(METRIC.findall(text))) > 60
    invented = "sum(rate(headrace_requests_total[5m])) + headrace_invented_seconds_bucket + headrace_selects"
    assert unknown(invented, known) == {"headrace_invented_seconds_bucket", "headrace_selects"}


def unknown(text: str, known: set[str]) -> set[str]:
    """The metrics that a text asks for and no service has."""
    return {name for name in METRIC.findall(text) if not {name, SERIES.sub("", name)} & known}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = [
        {"record": "checked", "expr": shown(query.expr)}
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
    ]
    file = tmp_path / "rules.yml"
    file.write_text(
        yaml.safe_dump({"groups": [{"name": f"{number}", "rules": [rule]} for number, rule in enumerate(rules)]})
    )
    told = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stdout + told.stderr
