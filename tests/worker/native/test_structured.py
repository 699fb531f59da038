"""A real model's answers follow random schemas: they are JSON that parses, match the schema, and end.

STRUCTURED_SCHEMAS says how many there are.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.completions import CompletionRequest
from services.frontend.protocol.structured import StructuredOutputs
from services.frontend.structured.grammar import answer_grammar
from services.frontend.tool_parsers.parser import FORMATS, FormatName, ParsePlan
from services.worker.native.runner import NativeRunner
from shared.messages.generate import Sampling
from tests import json_schemas
from tests.frontend.tool_parsers.transcripts import read
from tests.json_schemas import holds
from tests.worker.native.works import work

SCHEMAS = int(os.environ.get("STRUCTURED_SCHEMAS", "20"))
BATCH = 10
MOST_TOKENS = 400
BLOCK_SIZE = 16
BLOCKS = (MOST_TOKENS + 64) // BLOCK_SIZE
"""The blocks of a sequence."""
PROMPT = "<|im_start|>user\nDescribe somebody as JSON.<|im_end|>\n<|im_start|>assistant\n"

_NUMBERS = itertools.count(0, BATCH)
"""The numbers of sequences; none is used twice, as in an engine."""


def answers(runner: NativeRunner, prompt: list[int], held: list[Sampling]) -> list[list[int]]:
    """Compute the answers of all grammars at once, each to its end."""
    first = next(_NUMBERS)
    histories, starts = [list(prompt) for _ in held], [0] * len(held)
    running = set(range(len(held)))
    for _ in range(MOST_TOKENS):
        works = [
            work(
                histories[at],
                range(at * BLOCKS, (at + 1) * BLOCKS),
                start=starts[at],
                sampling=held[at],
                prompt_tokens=len(prompt),
                sequence=first + at,
            )
            for at in sorted(running)
        ]
        for at, drawn in zip(sorted(running), runner.step(works), strict=True):
            assert drawn is not None
            assert not drawn.error
            starts[at] = len(histories[at])
            histories[at].append(drawn.token)
            if drawn.token in runner.facts.eos_token_ids:
                running.remove(at)
        if not running:
            break
    assert not running, [held[at].grammar for at in running]
    return [history[len(prompt) : -1] for history in histories]


def test_answers_of_a_real_model_match_random_schemas(smollm2: Path) -> None:
    runner = NativeRunner(smollm2, capacity_blocks=BATCH * BLOCKS, block_size=BLOCK_SIZE)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    asked = 0

    @settings(
        max_examples=max(1, SCHEMAS // BATCH),
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
    )
    @examples(st.lists(json_schemas.SCHEMAS, min_size=BATCH, max_size=BATCH))
    def all_of(asked_for: list[dict[str, Any]]) -> None:
        nonlocal asked
        samplings = []
        for at, schema in enumerate(asked_for):
            found = answer_grammar(
                CompletionRequest(prompt="", structured_outputs=StructuredOutputs(json=schema)), ParsePlan(), {}
            )
            assert found is not None
            grammar = found.grammar
            samplings.append(Sampling(MOST_TOKENS, temperature=at % 2, seed=asked + at, top_p=0.9, grammar=grammar))
        outputs = answers(runner, prompt, samplings)
        asked += len(asked_for)
        for schema, output in zip(asked_for, outputs, strict=True):
            text = tokenizer.decode(output, skip_special_tokens=False)
            assert holds(json.loads(text), schema), (schema, text)

    try:
        all_of()
    finally:
        runner.close()
    assert asked >= SCHEMAS


def test_forced_calls_of_a_real_model_are_parsed_in_every_format_and_match_random_schemas(
    smollm2: Path,
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    runner = NativeRunner(smollm2, capacity_blocks=BATCH * BLOCKS, block_size=BLOCK_SIZE)

    @settings(
        max_examples=2,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
    )
    @examples(st.lists(json_schemas.SCHEMAS, min_size=2 * len(FORMATS), max_size=2 * len(FORMATS)))
    def all_of(values: list[dict[str, Any]]) -> None:
        names: list[FormatName] = [*FORMATS, *FORMATS]
        asked = list(zip(names, values, strict=True))
        samplings = []
        for at, (name, schema) in enumerate(asked):
            parameters = json_schemas.object_of({"value": schema}, 0)
            tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
            chat = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "tool_choice": "required"}
            found = answer_grammar(
                msgspec.convert({**chat, "parallel_tool_calls": False}, ChatRequest), ParsePlan(name), {}
            )
            assert found is not None
            samplings.append(Sampling(MOST_TOKENS, temperature=at % 2, seed=at, top_p=0.9, grammar=found.grammar))
        for (name, schema), output in zip(asked, answers(runner, prompt, samplings), strict=True):
            text = tokenizer.decode(output, skip_special_tokens=False)
            schemas = {"weather": json_schemas.object_of({"value": schema}, 0)}
            answer = read(ParsePlan(name), [text], schemas=schemas)
            [(called, arguments)] = answer.calls
            assert (called, answer.outcomes, answer.content) == ("weather", ["complete"], ""), text
            assert holds(json.loads(arguments)["value"], schema), (schema, text)

    try:
        all_of()
    finally:
        runner.close()
