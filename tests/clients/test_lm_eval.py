"""lm-evaluation-harness, unchanged, over `/v1/completions`: it rates texts by the log-probabilities of prompts.

What it finds is compared with what the native engine computes for the same tokens, which agrees with transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.worker.native.runner import NativeRunner
from tests.clients import environment
from tests.clients.conftest import run_to_its_end
from tests.clients.served import SPEAKER, Served, smollm2
from tests.worker.native.works import GREEDY, work

pytestmark = pytest.mark.timeout(1200)
BEGIN = 1
"""`<|im_start|>`, which the harness puts before a text that nothing precedes."""
DOCUMENTS: list[dict[str, Any]] = [
    {
        "question": "The capital of France is",
        "choices": ["Paris.", "a bicycle.", "seventeen."],
        "text": "The river is wide, and the mill at the river turns all day.",
    },
    {
        "question": "Water is made of hydrogen and",
        "choices": ["sand.", "oxygen.", "guitars."],
        "text": "Once upon a time there was a king. He had three sons, and none of them could read. " * 8,
    },
    {
        "question": "Paris is the capital of France. " * 20 + "The opposite of hot is",
        "choices": ["table.", "green.", "cold."],
        "text": "To bake bread you need flour, water, salt and yeast.<|im_end|>",
    },
]
TASKS = {
    "choices": {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}"},
    "continuations": {"output_type": "loglikelihood", "doc_to_text": "{{question}}"},
    "texts": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
}
TARGETS = {"choices": 0, "continuations": " {{choices[1]}}"}
METRICS = {"choices": "acc", "continuations": "perplexity", "texts": "byte_perplexity"}


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of tasks of our own. JSON is YAML, too."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "documents.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in DOCUMENTS))
    for name, fields in TASKS.items():
        task: dict[str, Any] = {"task": name, "dataset_path": "json", "validation_split": "validation"}
        task |= {"dataset_kwargs": {"data_files": {"validation": str(data)}}}
        task |= {"metric_list": [{"metric": METRICS[name]}], "metadata": {"version": 1}}
        target = {"doc_to_target": TARGETS[name]} if name in TARGETS else {}
        (folder / f"{name}.yaml").write_text(json.dumps(task | target | fields))
    return folder


class Rated:
    """Log-likelihoods as the native engine computes them."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._runner = NativeRunner(model, capacity_blocks=64)

    def continuation(self, before: str, text: str) -> float:
        known = self._tokenizer.encode(before, add_special_tokens=False).ids
        return self._rate(self._tokenizer.encode(before + text, add_special_tokens=False).ids, len(known))

    def text(self, text: str) -> float:
        return self._rate([BEGIN, *self._tokenizer.encode(text, add_special_tokens=False).ids], 1)

    def _rate(self, tokens: Sequence[int], known: int) -> float:
        sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
        [drawn] = self._runner.step([work(tokens, range(64), sampling=sampling)])
        assert drawn is not None
        assert drawn.prompt_logprobs is not None
        return float(np.frombuffer(drawn.prompt_logprobs.logprobs, "<f4")[known - 1 :].sum(dtype=np.float64))

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def rated(model: Path) -> Iterator[Rated]:
    one = Rated(model)
    yield one
    one.close()


@pytest.mark.parametrize("batch_size", [1, 4])
async def test_the_harness_finds_the_engines_log_likelihoods(
    stack: Served, model: Path, tasks: Path, rated: Rated, tmp_path: Path, batch_size: int
) -> None:
    python, found = environment.python(environment.HARNESS_PLACE, environment.HARNESS_LOCK), tmp_path / "found"
    arguments = {"model": SPEAKER, "base_url": f"{stack.url}/completions", "tokenizer": model}
    arguments |= {"tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 4}
    await run_to_its_end(
        [
            *(str(python), "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", str(batch_size)),
            *("--output_path", str(found), "--log_samples"),
        ],
        {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    answers = {name: _answers(found, name) for name in TASKS}
    for document, chosen, continued, text in zip(DOCUMENTS, *answers.values(), strict=True):
        question, choices = document["question"], document["choices"]
        assert [float(value) for (value, _), *_ in chosen] == pytest.approx(
            [rated.continuation(question, f" {choice}") for choice in choices], abs=0.02
        )
        [[[value, _]]] = continued
        assert float(value) == pytest.approx(rated.continuation(question, f" {choices[1]}"), abs=0.02)
        [[value]] = text
        assert float(value) == pytest.approx(rated.text(document["text"]), abs=0.02)


def _answers(found: Path, task: str) -> list[list[Any]]:
    """Return what the harness found for each document: for each of its questions, its answers."""
    [file] = found.rglob(f"samples_{task}_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    return [one["resps"] for one in samples]
