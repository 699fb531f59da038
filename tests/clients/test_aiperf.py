"""AIPerf, unchanged, driven by `headrace bench`: its report agrees with our usage, and `bench plot` reads it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.clients import environment
from tests.clients.conftest import run_to_its_end
from tests.clients.recorder import recorder, tokens
from tests.clients.served import SPEAKER, Served, smollm2

pytestmark = pytest.mark.timeout(1200)
HEADRACE = [sys.executable, "-P", "-m", "deploy.local.cli"]
REQUESTS, TOKENS = 4, 6
LOADS = (1, 2)
WAITS = (
    *("REGISTRATION_TIMEOUT", "REGISTRATION_MAX_ATTEMPTS", "START_TIMEOUT", "PROFILE_START_TIMEOUT"),
    *("COMMAND_RESPONSE_TIMEOUT", "COMMS_REQUEST_TIMEOUT", "CONNECTION_PROBE_TIMEOUT"),
)
"""How long the processes of AIPerf wait for one another: by default 30 s, which a busy machine takes longer than."""


async def test_a_sweep_of_aiperf_counts_what_the_frontend_counts(stack: Served, tmp_path: Path) -> None:
    python = environment.python(environment.HARNESS_PLACE, environment.HARNESS_LOCK)
    async with recorder(stack.url.removesuffix("/v1")) as proxy:
        await run_to_its_end(
            [
                *(*HEADRACE, "bench", "--driver", "aiperf", "--url", f"{proxy.url}/v1", "--model", SPEAKER),
                *("--tokenizer", str(smollm2()), "--concurrency", ",".join(map(str, LOADS)), "--warmup", "0"),
                *("--requests", str(REQUESTS), "--words", "24", "--output-tokens", str(TOKENS)),
                *("--out", str(tmp_path / "bench")),
            ],
            {
                **{f"AIPERF_SERVICE_{name}": "600" for name in WAITS},
                **{"PATH": f"{python.parent}:{os.environ['PATH']}", "HF_HOME": str(tmp_path / "hub")},
            },
        )
    files = [tmp_path / "bench" / f"concurrency-{load}" / "profile_export_aiperf.json" for load in LOADS]
    found = [json.loads(file.read_text()) for file in files]
    for one in found:
        assert one["request_count"]["avg"] == REQUESTS
        assert not one.get("error_request_count", {}).get("avg")
        assert one["output_sequence_length"]["avg"] == TOKENS
    prompts = sum(one["input_sequence_length"]["sum"] for one in found)
    assert len(proxy.asked) == len(LOADS) * REQUESTS
    assert tokens(proxy.asked) == {"prompt_tokens": prompts, "completion_tokens": len(proxy.asked) * TOKENS}
    assert {(one.path, one.status, one.ignored) for one in proxy.asked} == {("/v1/chat/completions", 200, ())}
    shown = await run_to_its_end([*HEADRACE, "bench", "plot", *map(str, files), "--out", str(tmp_path / "both")], {})
    assert all(f"concurrency {load}" in shown for load in LOADS)
    assert (tmp_path / "both.png").stat().st_size
