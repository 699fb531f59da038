from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from services.worker.native.logprobs import score

VOCAB = 23
Logits = NDArray[np.float32]


def exact(logits: Logits) -> NDArray[np.float64]:
    """Log-softmax of each row in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


@given(
    # few different numbers, so that many of them tie
    logits=hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(VOCAB)), elements=st.integers(-4, 4)),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=5),
    count=st.integers(0, VOCAB + 3),
)
def test_each_row_has_its_token_and_its_likeliest_ones_with_ties_by_the_lower_id(
    logits: Logits, tokens: list[int], count: int
) -> None:
    rows = len(logits)
    logprobs, top, top_logprobs = score(logits, np.asarray(tokens[:rows], np.int32), count)
    expected = exact(logits)
    assert logprobs == pytest.approx([expected[row, token] for row, token in enumerate(tokens[:rows])], abs=1e-6)
    assert top.shape == top_logprobs.shape == (rows, min(count, VOCAB))
    for row in range(rows):
        likeliest = sorted(range(VOCAB), key=lambda token: (-logits[row, token], token))[:count]
        assert top[row].tolist() == likeliest
        assert top_logprobs[row] == pytest.approx(expected[row, likeliest], abs=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_log_probability_and_changes_no_other(wrong: float) -> None:
    logits = np.linspace(-3, 3, 3 * VOCAB, dtype=np.float32).reshape(3, VOCAB)
    tokens = np.asarray([1, 2, 3], np.int32)
    sound = score(logits, tokens, 4)
    logits[1, 7] = wrong
    logprobs, top, top_logprobs = score(logits, tokens, 4)
    assert np.isnan(logprobs).tolist() == [False, True, False]
    assert np.isnan(top_logprobs[1]).all()
    for row in (0, 2):
        assert (logprobs[row], top[row].tolist()) == (sound[0][row], sound[1][row].tolist())
        assert top_logprobs[row].tolist() == sound[2][row].tolist()


def test_logits_far_apart_do_not_overflow() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :2] = 1e30, -1e30
    logprobs, top, _ = score(logits, np.asarray([1], np.int32), 2)
    assert logprobs[0] == pytest.approx(-2e30)
    assert top.tolist() == [[0, 2]]
