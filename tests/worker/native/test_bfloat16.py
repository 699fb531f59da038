"""Rounding, against NumPy's own arithmetic with wider numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.native.bfloat16 import from_bfloat16, to_bfloat16


def through(floats: NDArray[np.float32]) -> NDArray[np.float32]:
    wide: NDArray[np.float32] = from_bfloat16(to_bfloat16(np, floats))
    return wide


def test_every_bfloat16_is_converted_back_unchanged() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = from_bfloat16(bits)
    sound = ~np.isnan(wide)
    np.testing.assert_array_equal(to_bfloat16(np, wide)[sound], bits[sound])
    assert np.isnan(through(wide)[~sound]).all()


def test_a_number_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    step = 2.0**-7  # between neighbours from 1 on
    numbers = 1 + step * np.array([0.49, 0.5, 0.51, 1.49, 1.5, 1.51, -0.24, -0.26])
    expected = 1 + step * np.array([0, 0, 1, 1, 2, 2, 0, -0.5])
    np.testing.assert_array_equal(through(numbers.astype(np.float32)), expected)
    np.testing.assert_array_equal(through(-numbers.astype(np.float32)), -expected)


def test_the_error_is_at_most_half_a_step() -> None:
    numbers = np.random.default_rng(0).normal(size=(7, 5, 300)).astype(np.float32) * np.float32(1e3)
    assert np.abs(through(numbers) / numbers - 1).max() <= 2.0**-8


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_nan_stays_nan(payload: int) -> None:
    assert np.isnan(through(np.array([payload], np.uint32).view(np.float32))).all()


def test_a_number_that_is_too_large_becomes_infinite() -> None:
    largest = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max, np.inf], np.float32)
    np.testing.assert_array_equal(through(largest), [np.inf, -np.inf, np.inf])


def test_a_view_with_gaps_is_converted_too() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)[:, 1::2]
    np.testing.assert_array_equal(through(numbers), numbers)
