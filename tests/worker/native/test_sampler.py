"""Tests of the sampler against its definition, row by row, and with other rows in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.worker.contracts.runner import Drawn, Work
from services.worker.native.masks import Masks
from services.worker.native.sampler import is_plain, philox, sample, uniform
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.frames import NOT_FINITE
from shared.messages.generate import Sampling
from tests.worker.native.works import work

VOCAB = 40
Logits = NDArray[np.float32]
# kat_vectors of Random123: philox4x32 10 rounds; counter, key, result
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def settings(**changes: object) -> Sampling:
    return msgspec.convert({"max_tokens": 100, **changes}, Sampling)


def draw(logits: Logits, sampling: Sampling, index: int = 0, history: Sequence[int] = (0,), prompt: int = 1) -> Drawn:
    """Draw the token of one row alone; `index` is its place in the output, without a history."""
    [drawn] = sample(logits[None], [_work(sampling, index, history, prompt)])
    return drawn


def _work(sampling: Sampling, index: int = 0, history: Sequence[int] = (0,), prompt: int = 1) -> Work:
    if index:
        return Work(0, range(index + 1), index, index + 1, [], sampling, 1)
    return work(history, [], start=len(history) - 1, sampling=sampling, prompt_tokens=prompt)


def support(logits: Logits, sampling: Sampling, draws: int = 300) -> set[int]:
    """Return the tokens that one batch of many draws gives."""
    works = [_work(sampling, index) for index in range(1, draws + 1)]
    return {drawn.token for drawn in sample(np.tile(logits, (draws, 1)), works)}


rows = st.lists(st.floats(-8, 8, width=16), min_size=VOCAB, max_size=VOCAB).map(lambda row: np.array(row, np.float32))
biases = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16), max_size=5).map(
    lambda given: tuple(given.items())
)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([-2.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    logprobs=st.integers(-1, 20),
    logit_bias=biases,
)


@given(st.lists(st.tuples(rows, samplings, st.integers(1, 9)), min_size=1, max_size=6), st.randoms())
def test_a_row_draws_the_same_token_alone_and_among_others(
    batch: list[tuple[Logits, Sampling, int]], random: object
) -> None:
    works = [
        work([(7 * place + length) % VOCAB for place in range(length)], [], sampling=sampling, prompt_tokens=1)
        for _, sampling, length in batch
    ]
    together = sample(np.stack([row for row, _, _ in batch]), works)
    alone = [sample(row[None], [each])[0] for (row, _, _), each in zip(batch, works, strict=True)]
    assert together == alone


@given(rows, samplings)
def test_logits_are_not_changed(row: Logits, sampling: Sampling) -> None:
    logits = row[None].copy()
    sample(logits, [_work(sampling)])
    assert (logits == row).all()


@given(rows, st.integers(0, 1000))
def test_temperature_zero_takes_the_greatest(row: Logits, seed: int) -> None:
    assert draw(row, settings(temperature=0.0, seed=seed)).token == int(np.argmax(row))
    assert draw(row, settings(temperature=1e-9, seed=seed, top_p=0.5)).token == int(np.argmax(row))
    assert row[draw(row, settings(temperature=2.0, top_k=1, seed=seed)).token] == row.max()


@given(rows, st.integers(1, VOCAB))
def test_top_k_keeps_the_k_likeliest_and_those_equal_to_the_last(row: Logits, k: int) -> None:
    least = np.sort(row)[-k]
    for token in support(row, settings(top_k=k, temperature=2.0), 40):
        assert row[token] >= least - 1e-6  # logits this close are equal once the greatest is taken off


@given(rows, st.floats(0.01, 0.99))
def test_top_p_keeps_no_token_beyond_the_smallest_set_of_that_mass(row: Logits, p: float) -> None:
    probabilities = np.exp(row.astype(np.float64) - row.max())
    probabilities /= probabilities.sum()
    for token in support(row, settings(top_p=p), 40):
        likelier = probabilities[row > row[token]].sum()
        assert likelier < p + 1e-6


@given(rows, st.floats(0.01, 1.0))
def test_min_p_keeps_what_is_at_least_that_share_of_the_likeliest(row: Logits, min_p: float) -> None:
    for token in support(row, settings(min_p=min_p, temperature=0.7), 40):
        assert math.exp((float(row[token]) - float(row.max())) / 0.7) >= min_p * (1 - 1e-5)


def test_filters_keep_every_token_that_they_should() -> None:
    row = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
    assert support(row, settings()) == {0, 1, 2, 3, 4}
    assert support(row, settings(top_k=3)) == {0, 1, 2}
    assert support(row, settings(top_p=0.69)) == {0, 1}
    assert support(row, settings(top_p=0.71)) == {0, 1, 2}
    assert support(row, settings(top_p=0.01)) == {0}
    assert support(row, settings(min_p=0.3)) == {0, 1, 2}
    assert support(row, settings(min_p=1.0)) == {0}
    assert support(row, settings(top_k=4, top_p=0.87)) == {0, 1, 2}  # of the mass that top_k left, as in transformers
    assert support(row, settings(top_p=0.87)) == {0, 1, 2, 3}


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    row = np.log(probabilities).astype(np.float32)
    works = [_work(settings(seed=3), index) for index in range(1, 20_001)]
    counts = np.bincount([drawn.token for drawn in sample(np.tile(row, (20_000, 1)), works)], minlength=5)
    expected = probabilities * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-squared, 4 degrees of freedom: 0.1 %


def test_temperature_sharpens_and_flattens_as_defined() -> None:
    row = np.array([1.0, 0.0], np.float32)
    for temperature in (0.5, 2.0):
        works = [_work(settings(seed=9, temperature=temperature), index) for index in range(1, 20_001)]
        share = np.mean([drawn.token == 0 for drawn in sample(np.tile(row, (20_000, 1)), works)])
        assert abs(share - 1 / (1 + math.exp(-1 / temperature))) < 0.015


def test_the_same_seed_and_index_draw_the_same_wherever_the_request_continues() -> None:
    row = np.zeros(VOCAB, np.float32)
    here = [draw(row, settings(seed=5), index).token for index in range(1, 30)]
    there = [draw(row, settings(seed=5), index).token for index in range(1, 30)]
    other = [draw(row, settings(seed=6), index).token for index in range(1, 30)]
    assert here == there != other
    continued = work([1, 2, 3, 9, 9], [], sampling=settings(seed=5), prompt_tokens=3)  # two tokens came out elsewhere
    first_attempt = work([9, 9, 9, 9], [], start=3, sampling=settings(seed=5), prompt_tokens=2)
    assert continued.draw_index == first_attempt.draw_index == 2
    assert sample(row[None], [continued]) == sample(row[None], [first_attempt])


@given(
    rows,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    st.integers(0, 30),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([-2.0, 0.0, 0.5]),
    st.sampled_from([-1.0, 0.0, 2.0]),
)
def test_penalties_are_those_of_the_formula(
    row: Logits, history: list[int], prompt: int, repetition: float, presence: float, frequency: float
) -> None:
    prompt = min(prompt, len(history))
    expected = row.astype(np.float64)
    for token in set(history):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(history[prompt:]):
        expected[token] -= presence + frequency * history[prompt:].count(token)
    sampling = settings(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    token = draw(row, sampling, history=history, prompt=prompt).token
    assert expected[token] == pytest.approx(expected.max(), abs=1e-5)


@given(rows, biases, st.sampled_from([0.0, 2.0]))
def test_biases_are_added_before_penalties(
    row: Logits, given_biases: tuple[tuple[int, float], ...], presence: float
) -> None:
    expected = row.astype(np.float64)
    for token, bias in given_biases:
        expected[token] += bias
    expected[7] = expected[7] / 1.5 if expected[7] > 0 else expected[7] * 1.5
    expected[7] -= presence
    sampling = settings(temperature=0.0, logit_bias=given_biases, presence_penalty=presence, repetition_penalty=1.5)
    token = draw(row, sampling, history=[7, 7], prompt=1).token
    assert expected[token] == pytest.approx(expected.max(), abs=1e-4)


def test_a_bias_of_100_forces_a_token_and_of_minus_100_rules_it_out() -> None:
    row = np.linspace(-5, 5, VOCAB, dtype=np.float32)
    assert support(row, settings(logit_bias=((3, 100.0),))) == {3}
    ruled_out = tuple((token, -100.0) for token in range(2, VOCAB))
    assert support(row, settings(logit_bias=ruled_out)) == {0, 1}
    logprob = draw(row, settings(logit_bias=((3, 100.0),), logprobs=0)).logprob
    assert logprob is not None
    assert logprob.logprob == pytest.approx(row[3] - np.log(np.exp(row).sum())), "of the model's own distribution"


@given(rows, st.integers(0, 20), st.sampled_from([0.0, 1.0]))
def test_logprobs_are_of_the_raw_distribution(row: Logits, count: int, temperature: float) -> None:
    sampling = settings(logprobs=count, temperature=temperature, repetition_penalty=1.5, top_k=3, seed=1)
    drawn = draw(row, sampling, history=[1, 2, 3])
    exact = row - row.max() - math.log(np.exp(row.astype(np.float64) - row.max()).sum())
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(exact[drawn.token], abs=1e-5)
    top = unpack_tokens(drawn.logprob.top_tokens)
    assert top == sorted(range(VOCAB), key=lambda token: (-row[token], token))[:count]
    assert drawn.logprob.top_logprobs == pytest.approx([float(exact[token]) for token in top], abs=1e-5)


def test_no_logprobs_unless_asked_for() -> None:
    assert draw(np.zeros(VOCAB, np.float32), settings()).logprob is None


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error_of_their_row_and_the_others_draw_as_ever(broken: float) -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 2] = 1
    logits[1, 3] = broken
    works = [work([1], [0], sampling=one) for one in (settings(), settings(), settings(temperature=1.0, logprobs=2))]
    first, second, third = sample(logits, works)
    assert (second.token, second.suspect) == (0, True)
    assert second.error.startswith(NOT_FINITE)
    assert [first, third] == sample(logits[[0, 2]], [works[0], works[2]])
    assert not first.suspect
    assert not third.suspect
    assert sample(logits[1:2], works[1:2]) == [second], "alone"


def test_extreme_logits_neither_overflow_nor_leave_the_vocabulary() -> None:
    row = np.array([-3e38, 3e37, -3e38, 3e37], np.float32)
    for temperature in (1e-5, 1.0, 2.0):
        assert support(row, settings(temperature=temperature), 50) == {1, 3}


@pytest.mark.parametrize("factor", [5e-324, 1e-300, 1e300])
def test_an_absurd_repetition_penalty_stays_within_numbers(factor: float) -> None:
    row = np.array([1.0, -1.0, 0.0, 0.5], np.float32)
    alone = settings(repetition_penalty=factor, temperature=1.0)
    token = draw(row, alone, history=[0, 1]).token
    assert (token == 0) if factor < 1 else (token in (2, 3, 0))


def test_no_rows_draw_no_tokens() -> None:
    assert sample(np.empty((0, VOCAB), np.float32), []) == []


@given(rows, samplings, st.sets(st.integers(0, VOCAB - 1), min_size=1), st.integers(1, 9))
def test_masked_tokens_are_never_drawn_and_change_no_logprobs(
    row: Logits, sampling: Sampling, allowed: set[int], length: int
) -> None:
    mask = np.zeros(VOCAB, np.bool_)
    mask[list(allowed)] = True
    logits = row[None].copy()
    one = work([place % VOCAB for place in range(length)], [], sampling=sampling, prompt_tokens=1, sequence=7)
    [drawn] = sample(logits, [one], Masks({7: mask}, {}))
    assert drawn.token in allowed
    assert (logits == row).all()
    [free] = sample(logits, [one])
    if drawn.logprob is not None and free.logprob is not None:
        assert drawn.logprob.top_tokens == free.logprob.top_tokens
        assert drawn.logprob.top_logprobs == free.logprob.top_logprobs
    if mask.all():
        assert drawn == free


def test_a_mask_is_of_its_own_row_and_a_failed_grammar_is_an_error_there() -> None:
    logits = np.tile(np.arange(VOCAB, dtype=np.float32), (3, 1))
    mask = np.zeros(VOCAB, np.bool_)
    mask[3] = True
    works = [work([1], [], sequence=number) for number in range(3)]
    first, second, third = sample(logits, works, Masks({1: mask}, {2: "too much"}))
    assert (first.token, second.token) == (VOCAB - 1, 3)
    assert third.error == "too much"
    assert not first.error


@pytest.mark.parametrize(
    ("asked", "plain"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1}, True),
        ({"top_k": VOCAB}, True),
        ({"top_k": 2}, False),
        ({"top_p": 0.5}, False),
        ({"min_p": 0.1}, False),
        ({"temperature": 0.0, "presence_penalty": 1.0}, False),
        ({"frequency_penalty": 1.0}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"logit_bias": ((1, 1.0),)}, False),
        ({"grammar": "start: /a/"}, False),
        ({"allowed_tokens": pack_tokens([1])}, False),
        ({"logprobs": 20}, True),
    ],
)
def test_plain_rows_need_only_the_greatest_logit_or_an_unchanged_draw(asked: dict[str, object], plain: bool) -> None:
    sampling = msgspec.structs.replace(Sampling(max_tokens=1, temperature=1.0), **asked)
    assert is_plain(_work(sampling), VOCAB) == plain


def _barred(index: int, sampling: Sampling, barred: Sequence[int], sequence: int = 0) -> Work:
    return Work(sequence, range(index + 1), index, index + 1, [], sampling, 1, barred)


@given(rows, samplings, st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1))
def test_no_barred_token_is_drawn_before_the_least_tokens(row: Logits, sampling: Sampling, barred: set[int]) -> None:
    sampling = msgspec.structs.replace(sampling, min_tokens=3, grammar="")
    held = [_barred(index, sampling, sorted(barred)) for index in range(3)]
    assert not {drawn.token for drawn in sample(np.tile(row, (3, 1)), held)} & barred
    free = [sample(row[None], [_barred(3, sampling, given)]) for given in (sorted(barred), ())]
    assert free[0] == free[1], "afterwards they change nothing"


def test_a_row_draws_the_same_next_to_one_with_barred_tokens() -> None:
    row = np.arange(VOCAB, dtype=np.float32)
    greedy = settings(temperature=0.0, min_tokens=5)
    works = [_barred(0, greedy, [VOCAB - 1]), _barred(0, greedy, []), _barred(5, greedy, [VOCAB - 1])]
    assert [drawn.token for drawn in sample(np.tile(row, (3, 1)), works)] == [VOCAB - 2, VOCAB - 1, VOCAB - 1]


@given(rows, samplings, st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_only_allowed_tokens_are_drawn(row: Logits, sampling: Sampling, allowed: set[int]) -> None:
    sampling = msgspec.structs.replace(sampling, grammar="", allowed_tokens=pack_tokens(sorted(allowed)))
    works = [_barred(index, sampling, []) for index in range(3)]
    assert {drawn.token for drawn in sample(np.tile(row, (3, 1)), works)} <= allowed


def test_a_grammar_and_barred_tokens_count_next_to_allowed_ones() -> None:
    row = np.arange(VOCAB, dtype=np.float32)

    def drawn(allowed: Sequence[int], *grammar: int, barred: Sequence[int] = ()) -> int:
        greedy = settings(temperature=0.0, min_tokens=5, grammar="g", allowed_tokens=pack_tokens(allowed))
        [one] = sample(row[None], [_barred(0, greedy, barred)], Masks({0: np.isin(np.arange(VOCAB), grammar)}, {}))
        return one.token

    assert drawn([1, 3, 7], 3, 5) == 3
    assert drawn([1], 3, 5) == 5, "the grammar wins"
    assert drawn([3, 5], 3, 5, barred=[5]) == 3
    assert drawn([5], 3, 5, barred=[5]) == 5


def test_barred_tokens_stay_where_the_grammar_allows_nothing_else_or_there_is_nothing_else() -> None:
    row = np.arange(VOCAB, dtype=np.float32)
    greedy = settings(temperature=0.0, min_tokens=5, grammar="g")

    def drawn(barred: Sequence[int], *allowed: int) -> int:
        mask = np.isin(np.arange(VOCAB), allowed)
        [one] = sample(row[None], [_barred(0, greedy, barred)], Masks({0: mask}, {}))
        return one.token

    assert drawn([7], 3, 7) == 3
    assert drawn([7], 7) == 7
    assert drawn([3, 7], 3, 7) == 7
    [one] = sample(row[None], [_barred(0, settings(temperature=0.0, min_tokens=5), range(VOCAB))])
    assert one.token == VOCAB - 1


def test_barred_rows_with_and_without_a_grammar_are_drawn_together() -> None:
    row = np.arange(VOCAB, dtype=np.float32)
    free, held = settings(temperature=0.0, min_tokens=5), settings(temperature=0.0, min_tokens=5, grammar="g")
    works = [_barred(0, free, [39]), _barred(0, held, [30], 1), _barred(0, free, [38, 39], 2), _barred(0, held, [], 3)]
    mask = np.arange(VOCAB) <= 30
    assert [drawn.token for drawn in sample(np.tile(row, (4, 1)), works, Masks({1: mask, 3: mask}, {}))] == [
        *(38, 29, 37, 30)
    ]


def test_log_probabilities_are_those_before_tokens_were_barred() -> None:
    row = np.arange(VOCAB, dtype=np.float32)
    sampling = settings(temperature=0.0, min_tokens=5, logprobs=1)
    [held] = sample(row[None], [_barred(0, sampling, [VOCAB - 1])])
    [free] = sample(row[None], [_barred(0, sampling, [])])
    assert held.logprob is not None
    assert free.logprob is not None
    assert held.logprob.top_tokens == free.logprob.top_tokens
    assert held.logprob.logprob < free.logprob.logprob


def test_a_row_is_not_plain_while_tokens_are_barred() -> None:
    sampling = settings(min_tokens=2)
    assert [is_plain(_barred(index, sampling, [1]), VOCAB) for index in range(4)] == [False, False, True, True]
    assert is_plain(_barred(0, sampling, []), VOCAB)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    result = philox(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert result.tolist() == [list(expected)]


def test_uniform_numbers_are_the_top_53_bits_of_the_first_two_words() -> None:
    [number] = uniform(np.array([0], np.uint64), np.array([0], np.uint64))
    assert number == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_uniform_numbers_depend_on_all_of_seed_and_draw_and_lie_below_one(seed: int, draw: int) -> None:
    seeds = np.array([seed, seed ^ 1, seed ^ (1 << 63), seed], np.uint64)
    draws = np.array([draw, draw, draw, draw + 1], np.uint64)
    numbers = uniform(seeds, draws)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(set(numbers.tolist())) == 4


def test_many_draws_of_one_seed_are_even() -> None:
    draws = np.arange(100_000, dtype=np.uint64)
    numbers = uniform(np.full_like(draws, 42), draws)
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    chi_squared = ((counts - 2000.0) ** 2 / 2000.0).sum()
    assert chi_squared < 85  # 49 degrees of freedom: 0.1 %
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
