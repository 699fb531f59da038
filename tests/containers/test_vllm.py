"""compose.vllm.yaml with a vLLM for CPUs: the stack answers, and a killed worker's blocks are loaded from kvbm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.containers import vllm
from tests.containers.engine import Engine
from tests.containers.stack import LIMIT_S, MODEL, Stack
from tests.integration.stack import eventually
from tests.worker.vllm.environment import needs_vllm

pytestmark = needs_vllm
PROMPT = "The mill at the river turns, the mill at the dam stands still. " * 20
BLOCK = 32
"""Tokens of a block on a CPU."""


@pytest.fixture(scope="module")
def stack(engine: Engine) -> Iterator[Stack]:
    one = vllm.stack(engine)
    one.copy()
    one.up()
    yield one
    one.down("--volumes")


def ask(stack: Stack) -> tuple[str, dict[str, Any]]:
    """Return the answer to PROMPT, and its usage."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    answer = stack.request("POST", "http://127.0.0.1:8000/v1/completions", json.dumps(body), headers)
    assert answer.status == 200, answer
    found: dict[str, Any] = json.loads(answer.text)
    return found["choices"][0]["text"], found["usage"]


def total(stack: Stack, metric: str) -> float:
    return sum(float(each["value"][1]) for each in stack.metric(f"sum({metric})"))


def test_the_worker_with_vllm_answers_as_the_others_do(stack: Stack) -> None:
    answers = [stack.chat("What is the capital of France?", stream=stream) for stream in (False, True)]
    assert [answer.status for answer in answers] == [200, 200], answers
    assert "Paris" in answers[0].text
    assert answers[0].text == answers[1].text
    status = stack.compose("exec", "-T", "worker", "python", "-c", "print(open('/proc/1/status').read())")
    assert "CapEff:\t0000000000000000" in status
    assert "Uid:\t10001" in status


def test_what_a_killed_vllm_worker_has_computed_is_loaded_by_the_next_one(stack: Stack) -> None:
    text, usage = ask(stack)
    blocks = usage["prompt_tokens"] // BLOCK
    assert blocks > 4
    saved = "headrace_kvbm_committed_blocks_total"
    eventually(lambda: total(stack, saved) >= blocks - 1, limit_s=LIMIT_S, what="the prompt's blocks are in kvbm")
    stack.kill("worker", 1)
    eventually(stack.answers, limit_s=LIMIT_S, what="an answer")
    again, usage = ask(stack)
    assert again == text
    assert usage["prompt_tokens_details"]["cached_tokens"] >= (blocks - 1) * BLOCK, usage
    loaded = 'headrace_kvbm_copied_blocks_total{service="worker", outcome="loaded"}'
    eventually(lambda: total(stack, loaded) >= blocks - 1, limit_s=LIMIT_S, what="the worker counts what it has loaded")
