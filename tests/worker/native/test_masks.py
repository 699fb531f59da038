"""Masks follow their sequences' output: step by step, or all of it at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.worker.contracts.runner import Work
from services.worker.native.grammars import GrammarCache
from services.worker.native.masks import NO_MASKS, Masks, MaskThread
from shared.messages.generate import Sampling
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import work

VOCAB = 320
EOS = {0, 2}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["xy", "xz"]}}, "required": ["a"]}
OBJECT = json.dumps({"grammars": [{"json_schema": SCHEMA}]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def thread(model: Path) -> Iterator[MaskThread]:
    one = MaskThread(GrammarCache.from_directory(model, VOCAB, (0, 2)))
    yield one
    one.close()


def held(grammar: str, output: list[int], *, sequence: int = 1, draws: bool = True) -> Work:
    history = [5, 6, 7, *output]
    sampling = Sampling(max_tokens=100, grammar=grammar)
    return work(history, [], sampling=sampling, prompt_tokens=3, sequence=sequence, draws=draws)


def masks(thread: MaskThread, *works: Work) -> Masks:
    thread.begin(works)
    return thread.end()


def tokens(masks: Masks, sequence: int = 1) -> set[int]:
    return set(np.flatnonzero(masks.allowed[sequence]).tolist())


def test_steps_without_grammars_have_no_masks(thread: MaskThread) -> None:
    assert masks(thread, work([1, 2, 3], [])) is NO_MASKS
    assert masks(thread) is NO_MASKS


def test_a_mask_has_the_tokens_that_can_follow_and_at_the_end_only_end_tokens(thread: MaskThread, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    written = tokenizer.encode("ab", add_special_tokens=False).ids
    output: list[int] = []
    for token in written:
        allowed = tokens(masks(thread, held('start: "ab"', output)))
        assert token in allowed
        assert not allowed & EOS
        output.append(token)
    assert tokens(masks(thread, held('start: "ab"', output))) == EOS
    assert tokens(masks(thread, held('start: "abab" | "ab"', output, sequence=2)), 2) > EOS


def test_a_matcher_made_late_reaches_the_state_of_an_old_one(thread: MaskThread, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    written = tokenizer.encode('{"a": "xz"}', add_special_tokens=False).ids
    for length in range(len(written) + 1):
        output = written[:length]
        both = masks(thread, held(OBJECT, output), held(OBJECT, output, sequence=100 + length))
        assert tokens(both) == tokens(both, 100 + length)
    assert thread._matching.keys() == {1, 100 + len(written)}, "whoever is not in a step is forgotten"
    assert masks(thread, work([1], [])) is NO_MASKS
    assert not thread._matching


def test_a_sequence_that_does_not_draw_yet_has_no_mask(thread: MaskThread) -> None:
    before = masks(thread, held(OBJECT, [], draws=False))
    assert not before.allowed
    assert not before.failed
    assert tokens(masks(thread, held(OBJECT, [])))


def test_a_grammar_that_fails_fails_alone_and_says_why(thread: MaskThread) -> None:
    both = masks(thread, held("start: nothing", []), held(OBJECT, [], sequence=2), held(OBJECT, [9, 9], sequence=3))
    assert both.allowed.keys() == {2}
    assert both.failed.keys() == {1, 3}
    assert "nothing" in both.failed[1]
    assert all(len(why) < 400 for why in both.failed.values())
