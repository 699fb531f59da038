"""A real model's answers hold to schemas that nobody thought of: JSON that parses, of the schema's shape, with an end.

STRUCTURED_SCHEMAS says how many there are.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.frontend.grammar_fields import StructuredOutputs, held_by_structure
from services.worker.native.runner import NativeRunner
from shared.messages import Sampling
from tests.worker.native.works import work

SCHEMAS = int(os.environ.get("STRUCTURED_SCHEMAS", "20"))
BATCH = 10
MOST_TOKENS = 400
BLOCK_SIZE = 16
BLOCKS = (MOST_TOKENS + 64) // BLOCK_SIZE
"""Of a sequence."""
PROMPT = "<|im_start|>user\nDescribe somebody as JSON.<|im_end|>\n<|im_start|>assistant\n"

_WRITABLE = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])
"""SmolLM2 has no tokens for some bytes of rarer characters: a text that must have one it cannot write."""
_KEYS = st.text("abcdefg_", min_size=1, max_size=6)
_LEAVES = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, *[st.integers(0, 10**6)] * 2),
    st.builds(
        lambda words: {"enum": words}, st.lists(st.text(_WRITABLE, max_size=8), min_size=1, max_size=4, unique=True)
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 7}, {"type": "string", "format": "date"}]),
)


def _object(inner: dict[str, Any], optional: int) -> dict[str, Any]:
    required = list(inner)[optional:]
    return {"type": "object", "properties": inner, "required": required, "additionalProperties": False}


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(_object, st.dictionaries(_KEYS, inner, max_size=3), st.integers(0, 2)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(lambda either: {"anyOf": either}, st.lists(inner, min_size=1, max_size=2)),
    )


_SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=4)
_NUMBERS = itertools.count(0, BATCH)
"""Of sequences; none is used twice, as in an engine."""


def holds(value: Any, schema: dict[str, Any]) -> bool:
    """Of the words that are used here."""
    match schema:
        case {"anyOf": either}:
            return any(holds(value, one) for one in either)
        case {"enum": values}:
            return value in values
        case {"const": only}:
            return bool(value == only)
        case {"type": "object", "properties": properties, "required": required}:
            known = isinstance(value, dict) and set(required) <= value.keys() <= properties.keys()
            return known and all(holds(inner, properties[key]) for key, inner in value.items())
        case {"type": "array", "items": items, "maxItems": most}:
            return isinstance(value, list) and len(value) <= most and all(holds(inner, items) for inner in value)
        case {"type": "integer", "minimum": least, "maximum": most}:
            return type(value) is int and least <= value <= most
        case {"type": "string", **more}:
            return isinstance(value, str) and len(value) <= more.get("maxLength", 10)
        case {"type": "boolean"}:
            return isinstance(value, bool)
        case {"type": "null"}:
            return value is None
        case _:
            raise AssertionError(schema)


def answers(runner: NativeRunner, prompt: list[int], held: list[Sampling]) -> list[list[int]]:
    """What the model says, all at once, each to its end."""
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


def test_answers_of_a_real_model_hold_to_random_schemas(smollm2: Path) -> None:
    runner = NativeRunner(smollm2, capacity_blocks=BATCH * BLOCKS, block_size=BLOCK_SIZE)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    asked = 0

    @settings(
        max_examples=max(1, SCHEMAS // BATCH),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
    )
    @examples(st.lists(_SCHEMAS, min_size=BATCH, max_size=BATCH))
    def all_of(schemas: list[dict[str, Any]]) -> None:
        nonlocal asked
        held = []
        for at, schema in enumerate(schemas):
            piece = held_by_structure(StructuredOutputs(json=schema))
            assert piece is not None
            grammar = piece.text(thinks=False, begun=False)
            held.append(Sampling(MOST_TOKENS, temperature=at % 2, seed=asked + at, top_p=0.9, grammar=grammar))
        outputs = answers(runner, prompt, held)
        asked += len(schemas)
        for schema, output in zip(schemas, outputs, strict=True):
            text = tokenizer.decode(output, skip_special_tokens=False)
            assert holds(json.loads(text), schema), (schema, text)

    try:
        all_of()
    finally:
        runner.close()
    assert asked >= SCHEMAS
