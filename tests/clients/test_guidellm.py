"""GuideLLM, unchanged: its report agrees with the frontend's usage, and `bench plot` reads it.

Its data loader is torch's, which is 3 GB on PyPI: the torch here is the one of vLLM's environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.clients import environment
from tests.clients.conftest import run_to_its_end
from tests.clients.recorder import recorder, tokens
from tests.clients.served import SPEAKER, Served, smollm2
from tests.worker.vllm.environment import PYTHON, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]
REQUESTS, TOKENS = 4, 6
LOADS = (1, 2)
TORCH = ("torch", "torchgen", "sympy", "mpmath", "networkx")
"""torch, and what it imports."""


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A folder of packages with vLLM's torch and no more."""
    [packages] = PYTHON.parents[1].glob("lib/python*/site-packages")
    folder = tmp_path / "torch"
    folder.mkdir()
    for name in TORCH:
        (folder / name).symlink_to(packages / name)
    return folder


async def test_a_sweep_of_guidellm_counts_what_the_frontend_counts(stack: Served, torch: Path, tmp_path: Path) -> None:
    python, report = environment.python(environment.HARNESS_PLACE, environment.HARNESS_LOCK), tmp_path / "guide.json"
    async with recorder(stack.url.removesuffix("/v1")) as proxy:
        await run_to_its_end(
            [
                *(str(python.with_name("guidellm")), "run", "--disable-console"),
                *("--backend", f"kind=openai_http,target={proxy.url},model={SPEAKER}"),
                *("--profile", "kind=concurrent,streams=1", "--override", "profile.streams", ",".join(map(str, LOADS))),
                *("--constraint", f"kind=max_requests,count={REQUESTS}"),
                *("--tokenizer", f"kind=huggingface_auto,model={smollm2()}"),
                *("--data", f"kind=synthetic_text,prompt_tokens=24,output_tokens={TOKENS}"),
                *("--output", f"kind=json,path={report}"),
            ],
            {"PYTHONPATH": str(torch), "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        )
    found = json.loads(report.read_text())["benchmarks"]
    assert [one["config"]["strategy"]["streams"] for one in found] == list(LOADS)
    for one in found:
        totals = one["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    counted = {
        name: sum(one["metrics"][metric]["successful"]["total_sum"] for one in found)
        for name, metric in (("prompt_tokens", "prompt_token_count"), ("completion_tokens", "output_token_count"))
    }
    assert counted == tokens(proxy.asked)
    assert counted["completion_tokens"] == len(LOADS) * REQUESTS * TOKENS
    assert {(one.path, one.status, one.ignored) for one in proxy.asked} == {("/v1/chat/completions", 200, ())}
    plot = [sys.executable, "-P", "-m", "deploy.local.cli", "bench", "plot", str(report)]
    shown = await run_to_its_end([*plot, "--out", str(tmp_path / "plot")], {})
    assert all(f"concurrency {load}" in shown for load in LOADS)
