"""Embeddings of the native engine against a plain decoder in float64, which agrees with transformers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.contracts.runner import Drawn, Work
from services.worker.native.config import read_config
from services.worker.native.pooling import RowSpan, pooling_spans, step_results
from services.worker.native.prepare import prepare
from services.worker.native.runner import NativeRunner
from shared.messages.cards import Pooling
from shared.messages.frames import NOT_FINITE
from shared.messages.generate import Sampling
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES, CHECKED_POSITIONS, GOLDEN, prompt_tokens
from tests.worker.native.reference import embedding, last_hidden_states, logits_of
from tests.worker.native.works import work

TOKENS = prompt_tokens()
TOLERANCE = 1e-5
"""The largest difference of two vectors of length 1."""
ASKED: dict[Pooling, Sampling] = {
    "mean": Sampling(max_tokens=1, pooling="mean"),
    "last": Sampling(max_tokens=1, pooling="last"),
}
POOLINGS = list(ASKED)


class PooledVector:
    """A random model, and its expected embeddings."""

    def __init__(self, directory: Path, name: str = "llama") -> None:
        self.directory = prepare(
            write_tiny_model(directory / "model", **CASES[name]), directory / "cache", lambda _: None
        )
        self.states = last_hidden_states(self.directory, TOKENS)
        self.runner = NativeRunner(self.directory, capacity_blocks=64)

    def agrees(self, drawn: Drawn | None, pooling: Pooling, length: int = len(TOKENS)) -> None:
        expected = embedding(self.states[:length], pooling)
        np.testing.assert_allclose(vector(drawn), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def vector(drawn: Drawn | None) -> NDArray[np.float32]:
    assert drawn is not None
    return np.frombuffer(drawn.embedding, "<f4")


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[PooledVector]:
    one = PooledVector(tmp_path)
    yield one
    one.runner.close()


@pytest.mark.parametrize("name", CASES)
def test_both_poolings_are_those_of_a_plain_decoder_that_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    one = PooledVector(tmp_path, name)
    with np.load(GOLDEN / "logits.npz") as golden:
        logits = logits_of(one.directory, one.states[list(CHECKED_POSITIONS)])
        np.testing.assert_allclose(logits, golden[name], rtol=0, atol=1e-3)
    for pooling in POOLINGS:
        [drawn] = one.runner.step([work(TOKENS, range(13), sampling=ASKED[pooling])])
        one.agrees(drawn, pooling)
    assert one.runner.facts.embedding_size == read_config(one.directory).hidden
    one.runner.close()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_in_chunks_among_others_has_the_same_vector(llama: PooledVector, pooling: Pooling) -> None:
    ours = Work(7, TOKENS, 0, 0, range(13), ASKED[pooling], len(TOKENS))
    for end in (1, 30, 64, 65, len(TOKENS)):
        ours.start, ours.end = ours.end, end
        _, drawn, other = llama.runner.step(
            [work([9] * 5, [20], draws=False), ours, work(TOKENS[:3], [21], sampling=ASKED["mean"], sequence=8)]
        )
        llama.agrees(other, "mean", 3)
        assert (drawn is None) == (end < len(TOKENS))
    llama.agrees(drawn, pooling)


def test_a_mean_begins_again_where_its_prompt_does(llama: PooledVector) -> None:
    """A preempted prompt begins again from its first token."""
    ours = Work(7, TOKENS, 0, 100, range(13), ASKED["mean"], len(TOKENS))
    assert llama.runner.step([ours]) == [None]
    ours.blocks = range(20, 33)
    ours.end = len(TOKENS)
    [drawn] = llama.runner.step([ours])
    llama.agrees(drawn, "mean")


def test_the_last_position_is_found_after_a_cached_prefix(llama: PooledVector) -> None:
    llama.runner.step([work(TOKENS[:64], range(4), draws=False)])
    [drawn] = llama.runner.step([work(TOKENS, range(13), start=64, sampling=ASKED["last"])])
    llama.agrees(drawn, "last")


def test_vectors_and_tokens_of_one_step_are_those_that_each_has_alone(llama: PooledVector) -> None:
    works = [
        work(TOKENS[:40], range(3), sampling=ASKED["mean"]),
        work(TOKENS[:17], [3, 4]),
        work(TOKENS[:1], [5], sampling=ASKED["last"]),
        work(TOKENS[:33], range(6, 9), sampling=ASKED["last"]),
        work(TOKENS[5:9], [9], draws=False),
        work(TOKENS[:1], [10], sampling=ASKED["mean"]),
    ]
    alone = [llama.runner.step([one])[0] for one in works]
    together = llama.runner.step(works)
    for one, own, drawn in zip(works, alone, together, strict=True):
        if one.sampling.pooling:
            np.testing.assert_allclose(vector(drawn), vector(own), rtol=0, atol=1e-6)
        else:
            assert drawn == own


def test_vectors_have_length_1_and_each_work_its_own_span() -> None:
    works = [
        work([1, 2, 3], [0]),
        work([1, 2, 3], [0], sampling=ASKED["mean"]),
        work([1, 2, 3], [0], sampling=ASKED["last"], draws=False),
        work([1, 2], [0], sampling=ASKED["last"]),
    ]
    assert pooling_spans(works) == [RowSpan(3, 3), RowSpan(10, 1)]
    token = Drawn(5)
    drawn = step_results(works, [token], np.array([[3.0, 4.0], [0.0, 0.0]]))
    assert drawn[0] is token
    assert drawn[2] is None
    assert vector(drawn[1]).tolist() == [np.float32(0.6), np.float32(0.8)]
    assert vector(drawn[3]).tolist() == [0.0, 0.0], "no direction"


def test_hidden_states_that_are_not_finite_are_an_error_of_their_work_alone() -> None:
    works = [work([1], [0], sampling=ASKED["mean"])] * 2
    wrong, right = step_results(works, [], np.array([[1.0, np.nan], [3.0, 4.0]]))
    assert wrong is not None
    assert wrong.suspect
    assert wrong.error.startswith(NOT_FINITE)
    assert vector(right).tolist() == [np.float32(0.6), np.float32(0.8)]
