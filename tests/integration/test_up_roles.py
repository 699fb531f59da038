"""`headrace up --prefill N --decode M`: what a user sees of the roles, and a worker that joins by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.integration.stack import ROOT, eventually, running, with_models

LIMIT_S = 180.0


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=LIMIT_S) as answer:
        fields: dict[str, Any] = json.load(answer)
        return fields


def roles(state: Path) -> list[str]:
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(state)]
    shown = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=LIMIT_S).stdout)
    return sorted(row["role"] for row in shown["instances"] if row["service"] == "worker")


def test_ready_means_that_prompts_can_be_handed_over_and_a_worker_joins_with_the_settings_of_its_role(
    tmp_path: Path,
) -> None:
    state = with_models(tmp_path)
    with running(state, "--engine", "simulated", "--prefill", "1", "--decode", "1", "--kvbm-bytes", "64M") as up:
        assert not any("hand-overs" in line for line in up.output)
        programs = up.record["programs"]
        for name in ("prefill-0", "decode-0"):
            assert (state / "logs" / f"{name}.log").exists()
            assert "no_hand_over" not in health(programs[name]["observe"])
        assert roles(state) == ["decode", "prefill"]
        joining = [sys.executable, "-m", "services.worker", "--config", str(state / "run" / "decode-0.toml")]
        with (tmp_path / "joined.log").open("wb") as log:
            worker = subprocess.Popen([*joining, "--observe-port", "0"], cwd=ROOT, stdout=log, stderr=log)
        try:
            expected = ["decode", "decode", "prefill"]
            eventually(lambda: roles(state) == expected, limit_s=LIMIT_S, what="the third worker has joined")
        finally:
            worker.terminate()
            worker.wait(LIMIT_S)
