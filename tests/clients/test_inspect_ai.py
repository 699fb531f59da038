"""inspect_ai, unchanged, over both of its providers for such endpoints: its log says what the frontend answered."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environment
from tests.clients.conftest import run_to_its_end
from tests.clients.recorder import Exchange, recorder, tokens
from tests.clients.served import ECHO, SPEAKER, Served

pytestmark = pytest.mark.timeout(1200)
TASKS = os.path.relpath(environment.PROGRAMS / "inspect_tasks.py")
"""inspect_ai looks for files below the working directory."""
ACCURACY = {"texts": 0.75, "calls": 1.0}
"""How much of each task the model that says the last message back gets right."""
ASKED = {"texts": 4, "calls": 2}
"""The requests of each task to that model."""


@pytest.mark.parametrize("provider", ["openai-api/headrace", "vllm"])
async def test_an_evaluation_logs_the_frontends_answers(provider: str, stack: Served, tmp_path: Path) -> None:
    python = environment.python(environment.INSPECT_PLACE, environment.INSPECT_LOCK)
    models = [f"{provider}/{name}" for name in (ECHO, SPEAKER)]
    async with recorder(stack.url.removesuffix("/v1")) as proxy:
        address = {"HEADRACE_BASE_URL": f"{proxy.url}/v1", "VLLM_BASE_URL": f"{proxy.url}/v1"}
        await run_to_its_end(
            [
                *(str(python.with_name("inspect")), "eval", TASKS),
                *("--model", ",".join(models), "--temperature", "0", "--max-tokens", "100", "--max-connections", "4"),
                *("--log-format", "json", "--log-dir", str(tmp_path), "--display", "plain"),
            ],
            {**address, "HEADRACE_API_KEY": "any", "VLLM_API_KEY": "any", "XDG_DATA_HOME": str(tmp_path / "data")},
        )
    logs = _logs(tmp_path)
    assert len(logs) == len(models) * len(ACCURACY)
    for name, model in zip((ECHO, SPEAKER), models, strict=True):
        found = [log for log in logs if log["eval"]["model"] == model]
        asked = [one for one in proxy.asked if one.body["model"] == name]
        for log in found:
            _check_log(log, model)
        assert _counted(found, model) == tokens(asked)
        assert sorted(_completions(found)) == sorted(_texts(asked))
        if name == ECHO:
            scores = {log["eval"]["task"]: log["results"]["scores"][0]["metrics"]["accuracy"]["value"] for log in found}
            assert scores == ACCURACY
            assert len(asked) == sum(ASKED.values())


def _logs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in folder.glob("*.json")]


def _check_log(log: dict[str, Any], model: str) -> None:
    samples = len(log["samples"])
    assert log["status"] == "success"
    assert log["results"]["completed_samples"] == log["results"]["total_samples"] == samples
    assert not [sample["error"] for sample in log["samples"] if sample.get("error")]


def _counted(logs: list[dict[str, Any]], model: str) -> dict[str, int]:
    """Return what the logs say of tokens; prompts' tokens that were cached are apart there."""
    usages = [log["stats"]["model_usage"][model] for log in logs]
    prompts = sum(usage["input_tokens"] + usage.get("input_tokens_cache_read", 0) for usage in usages)
    return {"prompt_tokens": prompts, "completion_tokens": sum(usage["output_tokens"] for usage in usages)}


def _completions(logs: list[dict[str, Any]]) -> list[str]:
    """Return all that the models said, by the logs."""
    messages = [message for log in logs for sample in log["samples"] for message in sample["messages"]]
    return [message["content"] for message in messages if message["role"] == "assistant"]


def _texts(exchanges: list[Exchange]) -> list[str]:
    """Return all that the frontend answered."""
    return [json.loads(one.answer)["choices"][0]["message"]["content"] or "" for one in exchanges]
