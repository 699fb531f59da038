"""Rows with a grammar or with allowed tokens draw the same tokens on the device as in the NumPy engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from services.worker.config import CudaConfig
from services.worker.contracts.runner import Runner
from services.worker.native.config import read_config
from services.worker.native.grammars import GrammarCache
from services.worker.native.runner import NativeRunner
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import work

pytestmark = pytest.mark.gpu
cupy_on_a_device()

from tests.gpu.models import cuda_runner  # noqa: E402

SCHEMA = {"type": "array", "items": {"enum": ["mill", "river"]}, "minItems": 6, "maxItems": 6}
GRAMMAR = json.dumps({"grammars": [{"json_schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}}]})
HELD = (
    Sampling(max_tokens=100, temperature=0.0, grammar=GRAMMAR),
    Sampling(max_tokens=100, temperature=0.0),
    Sampling(max_tokens=100, temperature=0.0, grammar=GRAMMAR, repetition_penalty=1.2, logprobs=2),
    Sampling(max_tokens=100, temperature=0.8, seed=5, grammar=GRAMMAR, top_p=0.9),
)
LETTERS, DIGITS = [67, 68, 69], [18, 19, 20]
"""The tokens `a`, `b`, `c` and `0`, `1`, `2` of the tiny model."""


class Runners(NamedTuple):
    """One model on the device and in NumPy."""

    device: Runner
    reference: Runner


@pytest.fixture
def runners(tmp_path: Path) -> Iterator[Runners]:
    directory = write_tiny_model(tmp_path / "model", tied=False)
    config = read_config(directory)
    reference = NativeRunner(directory, capacity_blocks=64)
    grammars = GrammarCache.from_directory(directory, config.vocab, config.eos_token_ids)
    settings = CudaConfig(dtype="float32", graph_upper_bound=4)
    runner = cuda_runner(directory, settings, capacity_blocks=64, block_size=16, grammars=grammars)
    yield Runners(runner, reference)
    runner.close()
    reference.close()


def outputs(runner: Runner, settings: Sequence[Sampling], steps: int) -> list[list[int]]:
    """Return the outputs of one sequence for each setting, computed together; an ended sequence gets no more steps."""
    prompt = [5, 9, 40, 200, 17]
    histories, starts = [list(prompt) for _ in settings], [0] * len(settings)
    running = list(range(len(settings)))
    for _ in range(steps):
        if not running:
            break
        works = [
            work(
                histories[at],
                range(at * 8, at * 8 + 8),
                start=starts[at],
                sampling=settings[at],
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


def test_rows_with_a_grammar_draw_as_on_a_cpu_among_rows_without(runners: Runners) -> None:
    assert runners.device.facts.grammars
    assert outputs(runners.device, HELD, 100) == outputs(runners.reference, HELD, 100)


def test_rows_with_allowed_tokens_draw_only_these_and_as_on_a_cpu_among_rows_without(runners: Runners) -> None:
    allowed = [*LETTERS, *DIGITS]
    packed = pack_tokens(allowed)
    settings = (
        Sampling(max_tokens=100, temperature=0.0, allowed_tokens=packed),
        Sampling(max_tokens=100, temperature=0.0),
        Sampling(max_tokens=100, temperature=0.9, seed=5, allowed_tokens=packed),
        Sampling(max_tokens=100, temperature=0.9, seed=5),
        Sampling(max_tokens=100, temperature=1.5, seed=6, top_p=0.9, logprobs=2, allowed_tokens=packed),
        Sampling(max_tokens=100, temperature=0.0, logit_bias=((7, 100.0), (68, 100.0)), allowed_tokens=packed),
    )
    assert runners.device.facts.allowed_tokens
    drawn = outputs(runners.device, settings, 40)
    assert drawn == outputs(runners.reference, settings, 40)
    greedy, free, sampled, free_sampled, filtered, biased = map(set, drawn)
    assert greedy | sampled | filtered <= set(allowed)
    assert free - set(allowed)
    assert free_sampled - set(allowed)
    assert len(sampled) > 1
    assert biased == {68}, "a bias of a token that is not allowed changes nothing"


def test_a_grammar_counts_next_to_allowed_tokens_and_wins_where_they_share_none(runners: Runners) -> None:
    letters = "start: /[a-z]{20}/"
    settings = [
        Sampling(max_tokens=100, temperature=temperature, seed=5, grammar=letters, allowed_tokens=pack_tokens(allowed))
        for temperature in (0.0, 0.9)
        for allowed in ([*LETTERS, *DIGITS], DIGITS)
    ]
    drawn = outputs(runners.device, settings, 12)
    assert drawn == outputs(runners.reference, settings, 12)
    both, grammar_alone, both_sampled, grammar_alone_sampled = map(set, drawn)
    assert both | both_sampled <= set(LETTERS)
    assert not (grammar_alone | grammar_alone_sampled) & set(DIGITS)
