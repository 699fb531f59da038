"""Philox against Random123's known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.native.philox import philox, uniform

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


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    result = philox(np, np.array([counter], np.uint64), np.array([key], np.uint64))
    assert result.tolist() == [list(expected)]


def test_uniform_numbers_are_the_top_53_bits_of_the_first_two_words() -> None:
    [number] = uniform(np, np.array([0], np.uint64), np.array([0], np.uint64))
    assert number == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_uniform_numbers_depend_on_all_of_seed_and_draw_and_lie_below_one(seed: int, draw: int) -> None:
    seeds = np.array([seed, seed ^ 1, seed ^ (1 << 63), seed], np.uint64)
    draws = np.array([draw, draw, draw, draw + 1], np.uint64)
    numbers = uniform(np, seeds, draws)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(set(numbers.tolist())) == 4


def test_many_draws_of_one_seed_are_even() -> None:
    draws = np.arange(100_000, dtype=np.uint64)
    numbers = uniform(np, np.full_like(draws, 42), draws)
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    chi_squared = ((counts - 2000.0) ** 2 / 2000.0).sum()
    assert chi_squared < 85  # 49 degrees of freedom: 0.1 %
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
