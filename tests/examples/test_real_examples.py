"""Examples with what they are made for: the bundled model, two `vllm serve` and two vLLM workers on a CPU, LiteLLM."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import OpenAI

from tests.clients import environment
from tests.examples.running import ONE_EACH, Examples
from tests.examples.test_examples import answer_of
from tests.integration.stack import ROOT, eventually, with_models
from tests.process_tree import below
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, PYTHON, needs_vllm

pytestmark = pytest.mark.timeout(3600)
VLLM_FLAGS = "--dtype float32 --block-size 32 --enforce-eager --max-num-seqs 8 --num-gpu-blocks-override 256"
VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
TOKENS = 3000
READ_BEFORE = 50
"""Chunks until a server is killed."""


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    """Copies of all examples, for a tiny model that vLLM's kernels for CPUs take."""
    model = write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, context_length=4096, tied=False, seed=3)
    found = Examples(tmp_path, model)
    found.program("vllm", f'exec {PYTHON.with_name("vllm")} "$@"')
    return found


def words_of(pid: int) -> list[str]:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's lines."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


def streamed(examples: Examples, then: Callable[[], None] = lambda: None) -> str:
    """Return the text of a long answer; `then` happens in the middle of it."""
    text, finish = "", None
    with OpenAI(base_url=f"{examples.url('8000')}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        answer = client.completions.create(
            model="tiny",
            prompt="The mill at the river turns",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number, chunk in enumerate(answer):
            if number == READ_BEFORE:
                then()
            for choice in chunk.choices:
                text += choice.text
                finish = choice.finish_reason or finish
    assert finish == "length"
    return text


@needs_vllm
def test_an_answer_goes_on_when_the_vllm_that_computes_it_is_killed(examples: Examples) -> None:
    run, serve, ask = examples.commands("before-vllm")
    killed: list[str] = []
    limits = "--set worker.attached.limit_s=60 --set worker.health.limit_s=300"
    with (
        examples.running("before-vllm", f"{serve} {VLLM_FLAGS}", **VARIABLES) as servers,
        examples.running("before-vllm", f"{run} {ONE_EACH} {limits}") as route,
    ):
        route.wait_for(": serves\n", 2, LIMIT_S)
        route.wait_for("ready ", limit_s=LIMIT_S)
        assert route.text.count(", KV events at tcp://127.0.0.1:") == 2
        assert answer_of(examples.do("before-vllm", ask))
        whole = streamed(examples)

        def kill() -> None:
            port = next(port for port in ("8001", "8002") if metric(examples.url(port), "vllm:num_requests_running"))
            [server] = [pid for pid in below(servers.process.pid) if examples.ports[port] in words_of(pid)]
            for pid in (server, *below(server)):
                os.kill(pid, signal.SIGKILL)
            killed.append(examples.url(port))

        assert streamed(examples, kill) == whole
        assert metric(examples.url("8000"), "headrace_model_migration_total") == 1
        route.wait_for(f"{killed[0]}: left out: ", limit_s=LIMIT_S)


@needs_vllm
def test_prompts_and_answers_are_computed_by_two_vllms(examples: Examples) -> None:
    install, run, ask, explain = examples.commands("vllm-split")
    examples.do("vllm-split", install)
    flags = f"{ONE_EACH} --kvbm-bytes 256M --set worker.threads=1 --set worker.capacity_blocks=256"
    with examples.running("vllm-split", f"{run} {flags}", **VARIABLES) as started:
        started.wait_for("ready ", limit_s=LIMIT_S)
        assert "takes no part in hand-overs" not in started.text
        assert answer_of(examples.do("vllm-split", ask))
        assert "a pair costs" in examples.do("vllm-split", explain)
        shown = json.loads(examples.do("vllm-split", "headrace status --json"))["instances"]
        roles = [each["role"] for each in shown if each["service"] == "worker"]
        assert sorted(roles) == ["decode", "prefill"]


@pytest.mark.tier("long")
def test_a_laptop_answers(examples: Examples, tmp_path: Path) -> None:
    run, ask = examples.commands("laptop")
    with examples.running("laptop", run, HEADRACE_CACHE=str(with_models(tmp_path) / "models")) as started:
        started.wait_for("ready ")
        assert answer_of(examples.do("laptop", ask))


@pytest.mark.tier("long")
def test_litellms_clients_are_answered_through_its_proxy(examples: Examples) -> None:
    run, ask = examples.commands("with-litellm")[1:]
    _, serve, _ = examples.commands("before-vllm")
    stand_in = f'PYTHONPATH={ROOT} exec {sys.executable} -P -m tests.examples.stand_in "$@"'
    examples.program("vllm", stand_in)
    proxy = environment.python().with_name("litellm")
    examples.program("litellm", f'LITELLM_LOCAL_MODEL_COST_MAP=True exec {proxy} "$@"')
    key = {"LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(32)}"}
    with (
        examples.running("before-vllm", serve),
        examples.running("with-litellm", f"{run} {ONE_EACH}", **key) as started,
    ):
        started.wait_for(": serves\n", 2)

        def is_ready() -> bool:
            assert started.process.poll() is None, started.text
            try:
                with urllib.request.urlopen(f"{examples.url('4000')}/health/readiness", timeout=LIMIT_S) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        eventually(is_ready, limit_s=LIMIT_S, what="LiteLLM's proxy is ready")
        assert answer_of(examples.do("with-litellm", ask, **key))
