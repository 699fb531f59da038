"""A frontend that does not see the model's directory, as on another machine: the worker sends the files."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.integration.fleet import fleet
from tests.tiny_model import write_tiny_model

HIDE = 'mount -t tmpfs none "$0" && exec "$@"'
"""Runs a program that finds this directory empty."""
HIDES = bool(shutil.which("unshare")) and not (
    subprocess.run(["unshare", "-m", "sh", "-c", HIDE, "/mnt", "true"], capture_output=True).returncode
)


@pytest.mark.skipif(not HIDES, reason="no mounts of one's own can be made here")
def test_a_frontend_answers_with_the_tokenizer_and_template_that_a_worker_sends(tmp_path: Path, nats_url: str) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    where = ("--namespace", "apart", "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as services:
        services.start("router", "router")
        services.start("worker", "worker", "--model", str(model), "--engine", "echo")
        apart = services.start("frontend", "apart", through=("unshare", "-m", "sh", "-c", HIDE, str(model)))
        together = services.start("frontend", "together")
        services.wait_ready()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "grüße"}], "max_tokens": 8}
        texts = []
        for frontend in (apart, together):
            asked = urllib.request.Request(
                f"{frontend.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                texts.append(json.loads(answer.read())["choices"][0]["message"]["content"])
        assert texts[0] == texts[1] != ""
