"""Rows with a grammar draw the same tokens on the device as in the NumPy engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.worker.config import CudaConfig
from services.worker.contracts.runner import Runner
from services.worker.native.config import read_config
from services.worker.native.grammars import GrammarCache
from services.worker.native.runner import NativeRunner
from shared.messages.generate import Sampling
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import work

pytestmark = pytest.mark.gpu
cupy_on_a_device()

from tests.gpu.models import cuda_runner  # noqa: E402

SCHEMA = {"type": "array", "items": {"enum": ["mill", "river"]}, "minItems": 6, "maxItems": 6}
GRAMMAR = json.dumps({"grammars": [{"json_schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}}]})
SETTINGS = (
    Sampling(max_tokens=100, temperature=0.0, grammar=GRAMMAR),
    Sampling(max_tokens=100, temperature=0.0),
    Sampling(max_tokens=100, temperature=0.0, grammar=GRAMMAR, repetition_penalty=1.2, logprobs=2),
    Sampling(max_tokens=100, temperature=0.8, seed=5, grammar=GRAMMAR, top_p=0.9),
)


def outputs(runner: Runner, steps: int) -> list[list[int]]:
    """Return the outputs of one sequence for each setting, computed together; an ended sequence gets no more steps."""
    prompt = [5, 9, 40, 200, 17]
    histories, starts = [list(prompt) for _ in SETTINGS], [0] * len(SETTINGS)
    running = list(range(len(SETTINGS)))
    for _ in range(steps):
        works = [
            work(
                histories[at],
                range(at * 16, at * 16 + 16),
                start=starts[at],
                sampling=SETTINGS[at],
                prompt_tokens=len(prompt),
                sequence=at,
            )
            for at in running
        ]
        drawn = dict(zip(running, runner.step(works), strict=True))
        for at, one in drawn.items():
            assert one is not None
            assert not one.error
            starts[at] = len(histories[at])
            histories[at].append(one.token)
        running = [at for at in running if histories[at][-1] not in runner.facts.eos_token_ids]
    return [history[len(prompt) :] for history in histories]


def test_rows_with_a_grammar_draw_as_on_a_cpu_among_rows_without(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    config = read_config(directory)
    reference = NativeRunner(directory, capacity_blocks=64)
    grammars = GrammarCache.from_directory(directory, config.vocab, config.eos_token_ids)
    settings = CudaConfig(dtype="float32", graph_upper_bound=4)
    runner = cuda_runner(directory, settings, capacity_blocks=64, block_size=16, grammars=grammars)
    try:
        assert runner.facts.grammars
        assert outputs(runner, 100) == outputs(reference, 100)
    finally:
        runner.close()
        reference.close()
