"""Log-probabilities of prompts in the native engine, against a plain decoder in float64 and against transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.contracts.runner import Drawn, Work
from services.worker.native import runner as native_runner
from services.worker.native.prepare import prepare
from services.worker.native.prompt_logprobs import ScoredRows, score_rows, scored_rows, with_prompt_logprobs
from services.worker.native.runner import NativeRunner
from services.worker.native.sampler import NO_TOKEN
from shared.hashing import unpack_tokens
from shared.messages.frames import NOT_FINITE, PromptLogprobs
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES, CHECKED_POSITIONS, GOLDEN, prompt_tokens
from tests.worker.native.reference import last_hidden_states, logits_of
from tests.worker.native.works import GREEDY, work

TOKENS = prompt_tokens()
COUNT = 5
ASKED = msgspec.structs.replace(GREEDY, prompt_logprobs=COUNT)
TOLERANCE, RELATIVE = 1e-4, 2e-5
"""Differences allowed. The logits of random models go to hundreds, so their log-probabilities do, too."""
Floats = NDArray[np.float64]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def floats(packed: bytes) -> NDArray[np.float32]:
    return np.frombuffer(packed, "<f4")


class ScoredModel:
    """A random model, and the log-probabilities that each position of a prompt gives to all tokens."""

    def __init__(self, directory: Path, name: str = "llama") -> None:
        self.directory = prepare(
            write_tiny_model(directory / "model", **CASES[name]), directory / "cache", lambda _: None
        )
        self.expected = log_softmax(logits_of(self.directory, last_hidden_states(self.directory, TOKENS)))
        self.runner = NativeRunner(self.directory, capacity_blocks=64)

    def agrees(self, given: PromptLogprobs | None, first: int = 1, end: int = len(TOKENS), count: int = COUNT) -> None:
        """Assert that these are the log-probabilities of the prompt tokens first … end - 1."""
        assert given is not None
        assert given.is_sound
        assert (given.first, given.count) == (first, end - first)
        before = self.expected[first - 1 : end - 1]
        own = before[np.arange(end - first), TOKENS[first:end]]
        np.testing.assert_allclose(floats(given.logprobs), own, rtol=RELATIVE, atol=TOLERANCE)
        ids = np.asarray(unpack_tokens(given.top_tokens), np.int64).reshape(end - first, count)
        values = floats(given.top_logprobs).reshape(end - first, count)
        np.testing.assert_allclose(values, -np.sort(-before, axis=1)[:, :count], rtol=RELATIVE, atol=TOLERANCE)
        np.testing.assert_allclose(values, np.take_along_axis(before, ids, axis=1), rtol=RELATIVE, atol=TOLERANCE)


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[ScoredModel]:
    one = ScoredModel(tmp_path)
    yield one
    one.runner.close()


def prompt_of(drawn: Drawn | None) -> PromptLogprobs | None:
    assert drawn is not None
    assert not drawn.error
    return drawn.prompt_logprobs


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_transformers_and_of_a_plain_decoder(tmp_path: Path, name: str) -> None:
    one = ScoredModel(tmp_path, name)
    with np.load(GOLDEN / "logits.npz") as golden:
        expected = log_softmax(golden[name].astype(np.float64))
    prompt = prompt_of(one.runner.step([work(TOKENS, range(13), sampling=ASKED)])[0])
    one.agrees(prompt)
    assert prompt is not None
    checked = [position for position in CHECKED_POSITIONS if position + 1 < len(TOKENS)]
    own = [expected[at, TOKENS[position + 1]] for at, position in enumerate(checked)]
    np.testing.assert_allclose(floats(prompt.logprobs)[checked], own, rtol=RELATIVE, atol=TOLERANCE)
    one.runner.close()


def test_a_prompt_in_chunks_among_others_has_those_of_each_chunk_once(llama: ScoredModel) -> None:
    ours = Work(7, TOKENS, 0, 0, range(13), ASKED, len(TOKENS))
    for end in (1, 30, 64, 65, len(TOKENS)):
        ours.start, ours.end = ours.end, end
        _, drawn, other = llama.runner.step(
            [work([9] * 5, [20], draws=False), ours, work(TOKENS[:4], [21], sampling=ASKED, sequence=8)]
        )
        llama.agrees(prompt_of(other), end=4)
        llama.agrees(prompt_of(drawn), first=ours.scored, end=min(end + 1, len(TOKENS)))
        ours.scored = min(end + 1, len(TOKENS))
    assert drawn is not None
    assert drawn.token == int(llama.expected[-1].argmax())


def test_those_that_are_known_are_not_computed_again(llama: ScoredModel) -> None:
    """A preempted prompt begins again from its first token."""
    ours = Work(7, TOKENS, 0, 100, range(13), ASKED, len(TOKENS), scored=71)
    llama.agrees(prompt_of(llama.runner.step([ours])[0]), first=71, end=101)
    ours.scored = 101
    assert llama.runner.step([ours]) == [None], "all that this chunk gives"
    ours.end, ours.scored = len(TOKENS), len(TOKENS)
    [drawn] = llama.runner.step([ours])
    assert prompt_of(drawn) is None


@pytest.mark.parametrize("count", [0, 1, 20])
def test_as_many_of_the_likeliest_are_given_as_are_asked_for(llama: ScoredModel, count: int) -> None:
    sampling = msgspec.structs.replace(ASKED, prompt_logprobs=count)
    llama.agrees(prompt_of(llama.runner.step([work(TOKENS, range(13), sampling=sampling)])[0]), count=count)


def test_the_output_has_none_of_them(llama: ScoredModel) -> None:
    [drawn] = llama.runner.step([work(TOKENS[:40], range(3), sampling=ASKED, prompt_tokens=30)])
    llama.agrees(prompt_of(drawn), end=30)
    [drawn] = llama.runner.step([work(TOKENS[:41], range(3), start=40, sampling=ASKED, prompt_tokens=30)])
    assert prompt_of(drawn) is None
    [drawn] = llama.runner.step([work(TOKENS[:1], [4], sampling=ASKED)])
    assert prompt_of(drawn) is None, "nothing precedes the only token"


def test_turns_of_few_rows_give_the_same(llama: ScoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_runner, "_TURN_BYTES", 4 * llama.runner.facts.vocab_size * 7)
    computed: list[int] = []
    logits = llama.runner._decoder.logits

    def counted(hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        computed.append(len(hidden))
        found: NDArray[np.float32] = logits(hidden)
        return found

    monkeypatch.setattr(llama.runner._decoder, "logits", counted)
    llama.agrees(prompt_of(llama.runner.step([work(TOKENS, range(13), sampling=ASKED)])[0]))
    assert max(computed) == 7


def test_rows_that_score_are_found_among_those_of_all_works() -> None:
    works = [
        work([1, 2, 3], [0]),
        work([4, 5, 6], [0], sampling=ASKED),
        Work(1, [4, 5, 6, 7, 8], 1, 4, [0], ASKED, 5, scored=3),
        work([4, 5, 6], [0], start=2, sampling=ASKED),
    ]
    found = [(one.first_row, one.first_token, one.tokens.tolist(), one.count) for one in scored_rows(works)]
    assert found == [(3, 1, [5, 6], COUNT), (7, 3, [7, 8], COUNT)]


def test_turns_are_joined_in_order() -> None:
    turns: list[tuple[int, int]] = []

    def score_turn(
        first: int, tokens: NDArray[np.int32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        turns.append((first, len(tokens)))
        values = -tokens.astype(np.float32)
        return values, np.repeat(tokens[:, None], count, axis=1), np.repeat(values[:, None], count, axis=1)

    given = score_rows(ScoredRows(10, 3, np.arange(1, 8, dtype=np.int32), 2), 3, score_turn)
    assert turns == [(10, 3), (13, 3), (16, 1)]
    assert given is not None
    assert (given.first, floats(given.logprobs).tolist()) == (3, [-1, -2, -3, -4, -5, -6, -7])
    assert unpack_tokens(given.top_tokens) == [token for token in range(1, 8) for _ in range(2)]


def test_numbers_that_are_not_finite_are_an_error_of_their_prompt_alone(llama: ScoredModel) -> None:
    weights = llama.runner._decoder._weights
    broken = weights.embedding.copy()
    broken[TOKENS[3]] = np.nan
    llama.runner._decoder._weights = dataclasses.replace(weights, embedding=broken)
    wrong, right = llama.runner.step(
        [
            Work(1, TOKENS, 0, 20, [0, 1], ASKED, len(TOKENS)),
            work([TOKENS[0], TOKENS[1]], [2], sampling=ASKED, sequence=2),
        ]
    )
    assert wrong is not None
    assert wrong.suspect
    assert wrong.error.startswith(NOT_FINITE)
    llama.agrees(prompt_of(right), end=2)


def test_a_token_that_is_none_stays_one() -> None:
    prompt = PromptLogprobs(1, bytes(4))
    works = [work([1, 2], [0], sampling=ASKED), work([1, 2], [0]), work([1, 2], [0], sampling=ASKED, draws=False)]
    suspect, plain, missing = with_prompt_logprobs(works, [NO_TOKEN, Drawn(5), None], [prompt, None])
    assert suspect is not None
    assert suspect.suspect
    assert plain == Drawn(5)
    assert missing == NO_TOKEN
