"""How long from `./headrace up` to the first token of an answer, when everything is installed?

Each run is a fresh `up` (servers, services, the converted model in the page cache), a streamed chat sent as
soon as `ready` is printed, and a Ctrl-C. Measured from the exec of ./headrace to the first piece of text.

With --single each round is an `up` and an `up --single`, both with the echo engine, which loads no weights: what one
process saves, and how long a notebook or a test waits.

What could mislead: the first run converts the model and fills the page cache, so it is a warm-up and not counted. Other
programs on the machine slow every run, so the best run is printed too, next to the median. Polling adds up to 0.1 s.

    python -m benchmarks.startup [--runs 5] [--single] [--quick] [--json] [-- FLAGS OF up …]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
GOAL_S = 5.0
"""The goal from the exec of `up` to the first token."""
SINGLE_GOAL_S = 1.5
"""The goal from the exec of `up --single` to `ready`."""
LIMIT_S = 300.0
"""The time limit of one run; the warm-up may fetch and convert the model."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--single", action="store_true", help="`up` and `up --single` in turn, with the echo engine")
    parser.add_argument("--quick", action="store_true", help="two runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("up", nargs="*", help="flags for `up`, after --")
    flags = parser.parse_args()
    sides = {"up": flags.up}
    if flags.single:
        echo = ["--engine", "echo", *flags.up]
        sides = {"up": echo, "up --single": ["--single", *echo]}
    for more in sides.values():
        _one(flags.port, more)
    rows = [
        {"side": side, **_one(flags.port, more)}
        for _ in range(2 if flags.quick else flags.runs)
        for side, more in sides.items()
    ]
    goals = _goals(rows)
    if flags.json:
        print(json.dumps(_report(rows, goals), indent=2))
        return 0
    print(f"{'':<12} {'ready s':>8} {'token s':>8} {'end s':>8}")
    for row in rows:
        print(f"{row['side']:<12} {row['ready_s']:8.2f} {row['first_token_s']:8.2f} {row['stopped_s']:8.2f}")
    for goal in goals:
        print(f"{goal['name']}: median {goal['value']:.2f} s, best {goal['best']:.2f} s (goal: under {goal['goal']} s)")
    return 0


def _goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each side's goal, with the median and the best of its runs."""
    goals = []
    for side, name, goal_s in (("up", "first_token_s", GOAL_S), ("up --single", "ready_s", SINGLE_GOAL_S)):
        values = [row[name] for row in rows if row["side"] == side]
        if values:
            what = "first token" if name == "first_token_s" else "ready"
            median_s = statistics.median(values)
            goals.append(
                {
                    "name": f"{side} to {what}",
                    "value": median_s,
                    "best": min(values),
                    "unit": "s",
                    "goal": goal_s,
                    "met": median_s < goal_s,
                }
            )
    return goals


def _one(port: int, more: list[str]) -> dict[str, float]:
    """Return the seconds from exec to `ready` and to the first token, and from Ctrl-C to the end."""
    began_s = time.perf_counter()
    command = [str(ROOT / "headrace"), "up", "--port", str(port), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        try:
            line = up.stdout.readline()
            ready_s = time.perf_counter() - began_s
            if not line.startswith("ready "):
                raise SystemExit(f"`up` did not become ready:\n{up.communicate(timeout=LIMIT_S)[1]}")
            _first_token(line.split()[1])
            first_token_s = time.perf_counter() - began_s
        finally:
            stopping_s = time.perf_counter()
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=LIMIT_S)
    stopped_s = time.perf_counter() - stopping_s
    return {"ready_s": ready_s, "first_token_s": first_token_s, "stopped_s": stopped_s}


def _first_token(url: str) -> None:
    """Return when the first text of a streamed chat has come."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60.0)
    try:
        connection.request("GET", f"{parts.path}/models")
        model = json.load(connection.getresponse())["data"][0]["id"]
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": model, "messages": [question], "stream": True, "max_tokens": 8, "temperature": 0}
        connection.request("POST", f"{parts.path}/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {answer.read(1000)!r}")
        while line := answer.readline():
            if line.startswith(b"data: {") and any(
                choice["delta"].get("content") for choice in json.loads(line[6:]).get("choices", [])
            ):
                return
        raise SystemExit("the answer had no text")
    finally:
        connection.close()


def _report(rows: list[dict[str, Any]], goals: list[dict[str, Any]]) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "benchmark": "startup",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
        "commit": commit.strip(),
        "command": " ".join(["python -m benchmarks.startup", *sys.argv[1:]]),
        "goals": goals,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
